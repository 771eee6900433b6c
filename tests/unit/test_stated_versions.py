"""The version is `virnuc_core.__version__`; files outside of Python that have to repeat it repeat it exactly."""

import re
from pathlib import Path

import pytest

from virnuc_core import __version__

ROOT = Path(__file__).parents[2]
PLACES = ("CITATION.cff", "Dockerfile", "deployments", "workflows")
MUST_STATE_IT = {"CITATION.cff", "workflows/conda/recipe.yaml", "workflows/galaxy/macros.xml"}
_STATED = re.compile(
    r'(?:^\s*version: *"?|@TOOL_VERSION@">|\bvirnuc"? *(?:==?|:) *"?)(\d+\.\d+\.\d+)', re.MULTILINE
)


def test_every_stated_version_is_that_of_the_package() -> None:
    files = [
        path for place in PLACES for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()
    ]
    stated = {
        path.relative_to(ROOT).as_posix(): set(_STATED.findall(path.read_text(errors="replace")))
        for path in files
    }
    assert stated.keys() >= MUST_STATE_IT
    assert all(stated[name] for name in MUST_STATE_IT)
    assert {name: found for name, found in stated.items() if found - {__version__}} == {}


@pytest.mark.parametrize(
    "line",
    [
        '  version: "1.2.3"',
        "version: 1.2.3",
        '<token name="@TOOL_VERSION@">1.2.3</token>',
        "  - virnuc =1.2.3",
        '  - "bioconda::virnuc=1.2.3"',
        "virnuc==1.2.3",
        "'quay.io/biocontainers/virnuc:1.2.3--pyhdfd78af_0' }\"",
        "    virnuc: 1.2.3",
        '"virnuc": "1.2.3"',
    ],
)
def test_each_form_of_stating_it_is_seen(line: str) -> None:
    assert _STATED.findall(line) == ["1.2.3"]


@pytest.mark.parametrize("line", ["cff-version: 1.2.0", "virnuc >=1.2.3", "schema_version: 1.2.3"])
def test_other_versions_are_passed_over(line: str) -> None:
    assert _STATED.findall(line) == []
