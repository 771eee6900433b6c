"""The picture of the regions is drawn from the committed figures."""

from pathlib import Path

from PIL import Image

from scripts.render_regions import main


def test_picture(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "regions.png")]) == 0
    with Image.open(tmp_path / "regions.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
