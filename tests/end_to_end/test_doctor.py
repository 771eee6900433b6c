"""`virnuc doctor` in working and in broken environments."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import ESM2
from virnuc_core.doctor import checks, comparison
from virnuc_core.env_config import env, reload
from virnuc_core.versions import KnownVersions


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reload()


def findings(virnuc: CommandLine) -> tuple[int, dict[tuple[str, str], Any]]:
    result = virnuc("doctor", "--quick", "--json")
    return result.code, {(each["topic"], each["name"]): each for each in result.document["findings"]}


def test_nothing_is_wrong_here(virnuc: CommandLine) -> None:
    result = virnuc.done("doctor", "--quick")
    *lines, last = result.out.splitlines()
    assert all(line.startswith(("ok", "warning", "         ->")) for line in lines)
    assert "0 problems" in last
    assert result.err == ""


def test_a_home_that_cannot_be_written(
    virnuc: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file" / "home"))
    reload()
    code, found = findings(virnuc)
    assert code == 2
    assert found["home", "VIRNUC_HOME"]["state"] == "problem"
    assert virnuc("doctor", "--quick", "--quiet").out.startswith("problem  home: VIRNUC_HOME: ")


def test_a_torch_that_is_not_known_to_work(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "KNOWN_VERSIONS", (KnownVersions("torch", "<0.0.1", "problem"),))
    code, found = findings(virnuc)
    assert code == 5
    assert "<0.0.1" in found["versions", "torch"]["advice"]


def test_a_variable_that_is_wrong(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_THREADS", "many")
    env.cache_clear()
    code, found = findings(virnuc)
    assert code == 2
    assert "VIRNUC_THREADS is 'many'" in found["devices", "all of it"]["found"]
    assert found["versions", "torch"]["state"] == "ok"


def test_a_model_is_compared_with_the_original(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = virnuc.done("doctor", "--compare", "dnabert:tiny", "--json").document
    assert found["is_same"]
    assert found["program"].startswith("transformers ")
    assert found["runs"][0]["largest_difference"] < 1e-4
    # Bounds that rounding never meets.
    monkeypatch.setattr(comparison, "_LEAST_COSINES", {"fp32": 1.1})
    result = virnuc("doctor", "--compare", ESM2)
    assert result.code == 5
    assert result.out.splitlines()[-1] == "verdict: NOT the same"


@pytest.mark.parametrize(("model", "program"), [("esm2:tiny", "transformers"), (ESM2, "fair-esm")])
def test_a_comparison_needs_the_original(
    model: object, program: str, virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("esm.pretrained", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    message = f"needs {program}: pip install 'virnuc[reference]'."
    virnuc.refused(2, message, "doctor", "--compare", model)
