import io
from collections.abc import Iterable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from tasks.pages import plots
from tasks.pages.plots import p_virus_figure, throughput_figure
from virnuc_core.results.tables import PREDICTION_SCHEMA


def drawn_size(figure: Figure) -> tuple[int, int]:
    """Width and height in pixels of the saved image."""
    figure.savefig(picture := io.BytesIO())
    return Image.open(picture).size


def predictions(path: Path, values: Iterable[str]) -> Path:
    rows = [PREDICTION_SCHEMA.names]
    rows += [("name", "1", "1", "500", "F1", value, "virus", "scored") for value in values]
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def test_every_scored_chunk_is_in_the_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_BLOCK_ROWS", 2)
    values = ["0.000000", "0.499999", "0.500000", "NA", "1.000000", "0.999999"]
    figure = p_virus_figure(predictions(tmp_path / "predictions.tsv", values))
    (axes,) = figure.axes
    heights = [round(bar.get_height()) for bar in axes.patches]
    assert (heights[0], heights[24], heights[25], heights[49]) == (1, 1, 1, 2)
    assert sum(heights) == 5
    assert {text.get_text() for text in axes.texts} == {"other: 2", "virus: 3"}


def test_chunks_without_a_score_are_not_in_the_histogram(tmp_path: Path) -> None:
    figure = p_virus_figure(predictions(tmp_path / "predictions.tsv", ["NA", "NA"]))
    (axes,) = figure.axes
    assert {bar.get_height() for bar in axes.patches} == {0}
    assert {text.get_text() for text in axes.texts} == {"other: 0", "virus: 0"}
    assert drawn_size(figure) == (960, 540)


@pytest.mark.parametrize(("seconds", "unit"), [(60.0, "seconds"), (600.0, "minutes")])
def test_lanes_are_lines_over_the_time_of_the_run(seconds: float, unit: str) -> None:
    figure = throughput_figure([("a", [(1000.0, 5.0), (1000.0 + seconds, 7.0)]), ("b", [(1030.0, 6.0)])])
    (axes,) = figure.axes
    assert axes.get_xlabel() == unit
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 5.0], [60.0 if unit == "seconds" else 10.0, 7.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_many_lanes_have_no_names() -> None:
    figure = throughput_figure([("same name", [(0.0, 1.0), (1.0, 2.0)])] * 1000)
    assert len(figure.axes[0].lines) == 1000
    assert figure.axes[0].get_legend() is None
    assert drawn_size(figure) == (960, 540)
