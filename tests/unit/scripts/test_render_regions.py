"""docs/regions.md and its picture are what the result files give."""

from pathlib import Path

from PIL import Image

from scripts.render_regions import PAGE, TABLES, main, read_results

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_every_table_is_filled_and_the_picture_drawn(tmp_path: Path) -> None:
    page = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\ntext\n" for name in TABLES)
    (tmp_path / "images").mkdir()
    (tmp_path / "regions.md").write_text(page)
    assert main(["--page", str(tmp_path / "regions.md"), "--check"]) == 1
    assert main(["--page", str(tmp_path / "regions.md")]) == 0
    rendered = (tmp_path / "regions.md").read_text()
    assert "old" not in rendered
    assert rendered.count("text") == len(TABLES)
    results = read_results(ROOT / "benchmarks" / "results")
    assert PAGE.render(rendered, results) == rendered
    assert f"| {results['regions']['f1']:.3f} |" in rendered
    with Image.open(tmp_path / "images" / "regions.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
