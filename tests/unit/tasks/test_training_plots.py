from pathlib import Path

import numpy as np

from tasks.pages.plots import reliability_figure, roc_figure, save_png
from virnuc_core.training.metrics import KnownCalls, measure


def made_calls(count: int, *, both: bool = True) -> KnownCalls:
    p = np.linspace(0, 1, count)
    is_viral = (np.arange(count) % 3 > 0) & (p > 0.3) if both else np.ones(count, bool)
    return KnownCalls(
        is_viral=is_viral,
        is_called=p >= 0.5,
        p_virus=p,
        classes=np.where(is_viral, 0, 1),
        class_names=("viral", "other"),
        lengths=np.full(count, 500),
    )


def test_a_line_a_level_with_its_figure_and_none_for_one_class_alone() -> None:
    calls = {"chunks": made_calls(90), "contigs": made_calls(5, both=False)}
    (axes,) = roc_figure(calls).axes
    labels = [line.get_label() for line in axes.lines]
    area = measure(calls["chunks"]).auroc
    assert labels == [f"chunks: AUROC {area:.3f}", "chance"]


def test_a_reliability_line_goes_through_its_bins(tmp_path: Path) -> None:
    figures = measure(made_calls(90))
    figure = reliability_figure({"chunks": figures})
    (axes,) = figure.axes
    line = axes.lines[1]
    assert line.get_xdata().tolist() == [one.mean_p for one in figures.reliability]
    assert line.get_ydata().tolist() == [one.share_viral for one in figures.reliability]
    save_png(figure, tmp_path / "a.png")
    save_png(reliability_figure({"chunks": figures}), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
