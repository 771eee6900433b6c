"""The table of supported versions, and the findings on others."""

import logging
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from virnuc_core import versions
from virnuc_core.versions import (
    KNOWN_VERSIONS,
    KnownVersions,
    State,
    installed_version,
    log_version_warnings,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_what_is_installed_here_is_known_to_work() -> None:
    assert [known.check() for known in KNOWN_VERSIONS if known.check()[0] != "ok"] == []


def test_the_table_says_what_the_installation_asks_for() -> None:
    asked = map(Requirement, (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]))
    specifiers = {requirement.name: requirement.specifier for requirement in asked}
    for known in KNOWN_VERSIONS:
        lowest = {part for part in SpecifierSet(known.works) if part.operator != "<"}
        assert known.package not in specifiers or lowest <= set(specifiers[known.package]), known.package


@pytest.mark.parametrize(
    ("package", "works", "other", "is_optional", "state", "advice"),
    [
        ("numpy", ">=1,<99", "warning", False, "ok", ""),
        ("numpy", ">=98,<99", "warning", True, "warning", ">=98,<99"),
        ("numpy", "<1.26", "problem", False, "problem", "<1.26"),
        ("no-such-one", ">=1", "warning", True, "ok", ""),
        ("no-such-one", ">=1", "warning", False, "problem", "pip install"),
    ],
)
def test_a_version_is_judged(
    package: str, works: str, other: State, is_optional: bool, state: State, advice: str
) -> None:
    found = KnownVersions(package, works, other, is_optional=is_optional).check()
    assert found[:2] == (state, installed_version(package))
    assert advice in found[2]
    assert bool(advice) == bool(found[2])


def test_a_run_is_warned_once_of_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "KNOWN_VERSIONS", (KnownVersions("numpy", "<1.26", why="made up"),))
    log_version_warnings.cache_clear()
    with caplog.at_level(logging.WARNING, "virnuc_core"):
        log_version_warnings()
        log_version_warnings()
    [message] = caplog.messages
    assert message.startswith(f"numpy {installed_version('numpy')}: known to work: <1.26 (made up)")
