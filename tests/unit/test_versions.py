"""The table of supported versions, and the findings on others."""

import logging
import re
import tomllib
from pathlib import Path

import pytest

from virnuc_core import versions
from virnuc_core.versions import (
    FLASH_ATTN,
    FLASH_ATTN_VERSION,
    KNOWN_VERSIONS,
    KnownVersions,
    State,
    check_versions,
    installed_version,
    is_older,
    log_version_warnings,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_what_is_installed_here_is_known_to_work() -> None:
    assert [check.package for check in check_versions() if check.state != "ok"] == []


def test_the_table_says_what_the_installation_asks_for() -> None:
    asked = {
        re.split(r"[<>=]", line)[0]: line
        for line in [
            *PROJECT["dependencies"],
            *PROJECT["optional-dependencies"]["gpu"],
            f"python{PROJECT['requires-python']}",
        ]
    }
    assert asked.pop(FLASH_ATTN).startswith(f"{FLASH_ATTN}=={FLASH_ATTN_VERSION};")
    for known in KNOWN_VERSIONS:
        if known.package not in asked:
            assert known.is_optional, known.package
            continue
        bounds = dict(re.findall(r"(>=|<)([\d.]+)", asked[known.package]))
        assert bounds.get(">=", "0") == known.since, known.package
        assert "<" not in bounds or not is_older(bounds["<"], known.before), known.package


@pytest.mark.parametrize(
    ("package", "since", "before", "newer", "is_optional", "state", "advice"),
    [
        ("numpy", "1", "99", "warning", False, "ok", ""),
        ("numpy", "98", "99", "warning", True, "problem", ">=98,<99"),
        ("numpy", "0", "1.26", "warning", False, "warning", "<1.26"),
        ("numpy", "0", "1.26", "problem", False, "problem", "<1.26"),
        ("no-such-one", "1", "2", "warning", True, "ok", ""),
        ("no-such-one", "1", "2", "warning", False, "problem", "pip install"),
    ],
)
def test_a_version_is_judged(
    package: str, since: str, before: str, newer: State, is_optional: bool, state: State, advice: str
) -> None:
    [check] = check_versions(
        [KnownVersions(package, "compute", since, before, newer, is_optional=is_optional)]
    )
    assert (check.found, check.state) == (installed_version(package), state)
    assert advice in check.advice
    assert bool(check.advice) == bool(advice)


def test_versions_are_compared_by_their_numbers() -> None:
    assert is_older("2.9.1", "2.11")
    assert not is_older("2.13.0+cpu", "2.13")
    assert not is_older("580.65.06", "580")


def test_a_run_is_warned_of_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = KnownVersions("numpy", "compute", "0", "1.26", why="made up")
    monkeypatch.setattr(versions, "KNOWN_VERSIONS", (old,))
    with caplog.at_level(logging.WARNING, "virnuc_core"):
        log_version_warnings("orchestration")
        assert caplog.messages == []
        log_version_warnings("compute")
    [message] = caplog.messages
    assert message.startswith(f"numpy {installed_version('numpy')}: known to work: <1.26 (made up)")
