"""Short versions of the programs in benchmarks/reliability, which `make soak` runs in full."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.faults import compiler
from benchmarks.reliability.fuzz import draw_inputs
from benchmarks.reliability.harness import run_forked
from benchmarks.reliability.readers import READERS
from virnuc_core.errors import InputError

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    compiler() is None,
    reason="needs a C compiler (cc, gcc, clang): faults are injected by a library made from C",
)


def report_of(out: Path, name: str, *arguments: str) -> dict[str, Any]:
    """The report of a program, which must end with 0."""
    command = [sys.executable, "-m", f"benchmarks.reliability.{name}", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["failures"] == []
    return report


@pytest.fixture
def report(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return report_of(tmp_path / "report.json", *request.param)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("report", [("os_errors", "--number", "9")], indirect=True)
def test_calls_that_fail(report: dict[str, Any]) -> None:
    found = report["inline"]
    assert found["resumed_identical"] == sum(found["cases"].values()) == 9
    assert found["endings"]["exit code 6"] > 4


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("report", [("commit_points", "--number", "4")], indirect=True)
def test_kills_at_commit_points_and_power_failures(report: dict[str, Any]) -> None:
    assert report["continued_identical"] == {"as it is": 4, "content lost": 4, "names lost": 4}


@pytest.mark.slow
@pytest.mark.parametrize("report", [("kills", "--number", "2")], indirect=True)
def test_kills_at_random(report: dict[str, Any]) -> None:
    assert report["kills"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("report", [("flips", "--number", "40")], indirect=True)
def test_flipped_bytes(report: dict[str, Any]) -> None:
    assert report["outcomes"]["shard"]["found"] > 10
    assert report["outcomes"]["embeddings.h5, verified"]["found"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("report", [("batch_mates", "--number", "40")], indirect=True)
def test_batch_mates(report: dict[str, Any]) -> None:
    assert {case["model"] for case in report["cases"]} == {"esm2:tiny", "dnabert:tiny"}
    for case in report["cases"]:
        assert min(way["sequences"] for way in case["ways"].values()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("report", [("soak", "--number", "40", "--chunks", "0")], indirect=True)
def test_runs_one_after_another(report: dict[str, Any]) -> None:
    found = report["soak"]
    assert found["open_files_more"] == found["threads_more"] == 0
    assert found["bytes_more_each_run"] < 300_000


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # A bound against quadratic time: a busy machine may need a few times as long as the one that was measured.
    out = tmp_path_factory.mktemp("fuzz") / "report.json"
    readers: dict[str, Any] = report_of(out, "fuzz", "--number", "120", "--seconds", "20")["readers"]
    return readers


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_input_gives_a_result_or_an_error_of_virnuc(reader: str, fuzzed: dict[str, Any]) -> None:
    found = fuzzed[reader]
    assert found["accepted"] + found["refused"] == found["inputs"] >= 120
    assert (found["accepted"] and found["refused"]) or reader in ("run.json", "HDF5 shards", "lane journals")


def test_the_same_inputs_every_time() -> None:
    def inputs() -> list[bytes]:
        made: list[bytes] = []
        draw_inputs("FASTA", {"in.fa": b">a\nACGT\n" * 20}, 200, 7, lambda *one: made.append(one[-1]))
        return made

    first = inputs()
    assert first == inputs()
    assert len(first) == 200
    assert len(set(first)) > 100


def refuse() -> None:
    raise InputError("no record")


def leave() -> None:
    os.execv("/bin/false", ["/bin/false"])


CASES: dict[str, tuple[Callable[[], object], str, str]] = {
    "returns": (dict, "completed", ""),
    "refuses": (refuse, "refused", "no record"),
    "raises": (lambda: 1 // 0, "traceback", "ZeroDivisionError"),
    "executes another program": (leave, "traceback", ""),  # exit code 1 is that of an unexpected error
    "is ended by a signal": (lambda: os.kill(0, signal.SIGUSR1), "crash", "SIGUSR1"),
    "is killed": (lambda: os.kill(0, signal.SIGKILL), "killed", ""),
    "sleeps": (lambda: time.sleep(60), "hang", "not ended after 10 s"),
}


def print_outcomes() -> None:
    print(json.dumps({name: asdict(run_forked(case, 10)) for name, (case, *_) in CASES.items()}))


def test_outcomes_of_forked_cases() -> None:
    # A process of its own: the exit of a fork may wait for threads that only its parent has.
    command = "from tests.crash.test_reliability import print_outcomes; print_outcomes()"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert {name: outcome["ending"] for name, outcome in outcomes.items()} == {
        name: ending for name, (_, ending, _) in CASES.items()
    }
    for name, (_, _, message) in CASES.items():
        assert message in outcomes[name]["message"]
