"""Programs of benchmarks/ and scripts/ answer --help; generated parts of the documentation and stated versions are up to date."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from scripts.render.__main__ import main as render
from virnuc_core import __version__

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if 'if __name__ == "__main__"' in path.read_text() and path.name != "child_usage.py"
)
_STATED = re.compile(r'(?:^\s*version: *"?|\bvirnuc"? *(?:==?|:) *"?)(\d+\.\d+\.\d+)', re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_answer_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(name.removesuffix(".__main__"), run_name="__main__")
    assert capsys.readouterr().out.startswith("usage:")


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
