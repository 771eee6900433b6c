"""docs/scaling.md is what the result files give."""

from pathlib import Path

import pytest

from scripts import render_scaling
from scripts.render_scaling import TABLES, Results, read_results

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TEXT = "# Title\n\n" + "".join(f"text\n\n<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in TABLES)


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results(RESULTS)


def rows_of(page: str, name: str) -> list[list[str]]:
    table = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]


def test_every_table_is_filled(results: Results) -> None:
    page = render_scaling.PAGE.render(TEXT, results)
    assert "old" not in page
    assert all(len(rows_of(page, name)) > 1 for name in TABLES)


def test_rendering_twice_changes_nothing(results: Results) -> None:
    page = render_scaling.PAGE.render(TEXT, results)
    assert render_scaling.PAGE.render(page, results) == page


def test_the_best_lane_of_a_row_is_bold(results: Results) -> None:
    for row in rows_of(render_scaling.PAGE.render(TEXT, results), "waste"):
        shares = [float(cell.strip("*% ")) for cell in row[2:]]
        bold = [float(cell.strip("*% ")) for cell in row[2:] if "**" in cell]
        assert bold
        assert set(bold) == {min(shares)}


def test_a_page_without_a_table_is_refused(results: Results) -> None:
    with pytest.raises(ValueError, match="no place for the table 'overhead'"):
        render_scaling.PAGE.render("# Title\n", results)


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert render_scaling.PAGE.main(["--check"]) == 0


def test_a_page_that_is_not_up_to_date_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "scaling.md"
    page.write_text(TEXT)
    assert render_scaling.PAGE.main(["--check", "--page", str(page)]) == 1
    assert "python -m scripts.render_scaling" in capsys.readouterr().out
    assert render_scaling.PAGE.main(["--page", str(page)]) == 0
    assert render_scaling.PAGE.main(["--check", "--page", str(page)]) == 0
