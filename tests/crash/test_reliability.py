"""Short versions of the programs in benchmarks/reliability."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def report_of(out: Path, name: str, *arguments: str) -> dict[str, Any]:
    """The report of a program, which must end with 0."""
    command = [sys.executable, "-m", f"benchmarks.reliability.{name}", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["failures"] == []
    return report


def test_kills_at_random(tmp_path: Path) -> None:
    assert report_of(tmp_path / "report.json", "kills", "--number", "2")["kills"] >= 2


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler: a library made from C injects faults"
)
def test_kills_at_changes_of_the_disk_power_failures_and_calls_that_fail(tmp_path: Path) -> None:
    report = report_of(tmp_path / "report.json", "faults", "--number", "10")
    assert report["kills"]["continued_identical"] == {"as it is": 10, "content lost": 10, "names lost": 10}
    assert report["errors"]["endings"]["exit code 6"] >= 3


@pytest.mark.timeout(900)
def test_hostile_input_gives_a_result_or_an_error_of_virnuc(tmp_path: Path) -> None:
    readers = report_of(tmp_path / "report.json", "fuzz", "--number", "20")["readers"]
    for name, found in readers.items():
        assert found["accepted"] + found["refused"] == found["inputs"] > 20
        assert found["accepted"]
        assert found["refused"] or name == "shards"


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "returns": (dict, "completed"),
    "raises": (lambda: 1 // 0, "traceback"),
    "executes another program": (lambda: os.execv("/bin/false", ["/bin/false"]), "traceback"),
    "is ended by a signal": (lambda: os.kill(0, signal.SIGUSR1), "crash"),
    "is killed": (lambda: os.kill(0, signal.SIGKILL), "killed"),
    "sleeps": (lambda: time.sleep(60), "hang"),
}


def print_endings() -> None:
    from benchmarks.reliability.harness import run_forked

    print(json.dumps({name: run_forked(case, 5).ending for name, (case, _) in CASES.items()}))


def test_endings_of_forked_cases() -> None:
    # A process of its own: a fork has no threads, which libraries of the parent may wait for.
    command = "from tests.crash.test_reliability import print_endings; print_endings()"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {name: ending for name, (_, ending) in CASES.items()}
