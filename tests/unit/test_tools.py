"""Generated parts of the documentation and stated versions are up to date."""

import re
from pathlib import Path

import pytest

from scripts.render.__main__ import main as render
from virnuc_core import __version__

ROOT = Path(__file__).parents[2]
_STATED = re.compile(r'(?:^\s*version: *"?|\bvirnuc"? *(?:==?|:) *"?)(\d+\.\d+\.\d+)', re.MULTILINE)


def test_pages_are_what_they_are_made_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert render(["--check"]) == 0, capsys.readouterr().out


def test_every_stated_version_is_that_of_the_package() -> None:
    places = ("CITATION.cff", "Dockerfile", "deployments", "workflows")
    files = [
        path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()
    ]
    stated = {
        path.relative_to(ROOT).as_posix(): set(_STATED.findall(path.read_text(errors="replace")))
        for path in files
    }
    assert stated["CITATION.cff"] == stated["workflows/conda/recipe.yaml"] == {__version__}
    assert {name: found for name, found in stated.items() if found - {__version__}} == {}
