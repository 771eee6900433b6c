"""Short versions of the programs in benchmarks/reliability, which `make soak` runs in full."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.faults import LANE_ENVIRONMENT, compiler, shim_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that the programs would otherwise re-execute themselves to set."""
    folder = tmp_path_factory.mktemp("shim")
    return {**os.environ, **(shim_environment(folder) if compiler() else LANE_ENVIRONMENT)}


@pytest.fixture
def measure(tmp_path: Path, request: pytest.FixtureRequest, environment: dict[str, str]) -> dict[str, Any]:
    """The report of a program with its arguments."""
    name, *arguments = request.param.split()
    if name in ("os_errors", "commit_points", "kills") and compiler() is None:
        pytest.skip("needs a C compiler (cc, gcc, clang): faults are injected by a library made from C")
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", f"benchmarks.reliability.{name}", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize("measure", ["os_errors --number 9"], indirect=True)
def test_calls_that_fail(measure: dict[str, Any]) -> None:
    found = measure["inline"]
    assert found["failures"] == []
    assert found["resumed_identical"] == sum(found["cases"].values()) == 9
    assert found["endings"]["exit code 6"] > 4


@pytest.mark.parametrize("measure", ["commit_points --number 4"], indirect=True)
def test_kills_at_commit_points_and_power_failures(measure: dict[str, Any]) -> None:
    assert measure["failures"] == []
    assert measure["continued_identical"] == {"as it is": 4, "content lost": 4, "names lost": 4}
    assert measure["unsynced_at_the_end"] == []


@pytest.mark.parametrize("measure", ["kills --number 2"], indirect=True)
def test_kills_at_random(measure: dict[str, Any]) -> None:
    assert measure["failures"] == []
    assert measure["kills"] >= 2


@pytest.mark.parametrize("measure", ["flips --number 40"], indirect=True)
def test_flipped_bytes(measure: dict[str, Any]) -> None:
    assert measure["silent"] == 0
    assert measure["outcomes"]["shard"]["found"] > 10
    assert measure["outcomes"]["embeddings.h5, verified"]["found"] > 10


@pytest.mark.parametrize("measure", ["batch_mates --number 40"], indirect=True)
def test_batch_mates(measure: dict[str, Any]) -> None:
    assert {case["model"] for case in measure["cases"]} == {"esm2:tiny", "dnabert:tiny"}
    ways = [way for case in measure["cases"] for way in case["ways"].values()]
    assert min(way["sequences"] for way in ways) >= 10
    assert {way["other"] for way in ways} == {0}


@pytest.mark.parametrize("measure", ["soak --number 10 --chunks 0"], indirect=True)
def test_runs_one_after_another(measure: dict[str, Any]) -> None:
    found = measure["soak"]
    assert found["with_other_outputs"] == found["processes_left"] == 0
    assert found["open_files_more"] == found["threads_more"] == 0
    assert found["files_left"] == []
    assert found["bytes_more_each_run"] < 300_000
