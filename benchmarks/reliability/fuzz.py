"""Feeds hostile inputs to every reader of virnuc: the only outcomes allowed are a result and an error of virnuc's own.

    python -m benchmarks.reliability.fuzz [--inputs 10000] [--reader NAME] [--seed N]

Prints the figures of each reader and writes them to benchmarks/results/reliability/fuzz.json; ends with 1 when anything else happened.
Each reader has a process of its own (benchmarks/reliability/child.py) with 2 GB of memory in all; an input may take 5 s of
processor time. Weight files are read under an audit hook, which tells of every process, connection and name looked up for a
pickle: "executed" counts the inputs that brought about any.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.child import MEMORY_BYTES
from benchmarks.reliability.readers import READERS
from benchmarks.reports import print_and_write

MOST_SECONDS: Final = 5.0
_START_SECONDS: Final = 300.0
# On a busy machine, a process may wait long for CPU time.
_WALL_FACTOR: Final = 12
_KEPT_FAILURES: Final = 20
_ALLOWED: Final = ("accepted", "refused")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class Figures:
    """Outcomes of one reader's inputs.

    Attributes:
        outcomes: number of inputs by outcome.
        slowest_seconds: maximum CPU time of an input.
        slowest: that input.
        peak_mb: maximum resident memory of a process.
        failures: the first inputs with a forbidden outcome.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    slowest: str = ""
    peak_mb: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        """Counts one input."""
        outcome = result["outcome"]
        if outcome in _ALLOWED and result.get("seconds", 0.0) > MOST_SECONDS:
            outcome = "hang"
        self.outcomes[outcome] += 1
        if result.get("seconds", 0.0) > self.slowest_seconds:
            self.slowest_seconds, self.slowest = result["seconds"], f"{result['index']}: {result['input']}"
        self.peak_mb = max(self.peak_mb, result.get("peak_mb", 0))
        if outcome not in _ALLOWED and len(self.failures) < _KEPT_FAILURES:
            self.failures.append({**result, "outcome": outcome})

    @property
    def document(self) -> dict[str, Any]:
        """The report's content."""
        names = (*_ALLOWED, "traceback", "hang", "crash", "executed", "harmful message")
        return {
            "inputs": self.outcomes.total(),
            **{name.replace(" ", "_"): self.outcomes[name] for name in names},
            "slowest_seconds": self.slowest_seconds,
            "slowest": self.slowest,
            "peak_mb": self.peak_mb,
            "failures": self.failures,
        }

    @property
    def is_clean(self) -> bool:
        """Whether all outcomes are allowed."""
        return set(self.outcomes) <= set(_ALLOWED)


def fuzz_reader(name: str, inputs: int, seed: int, folder: Path) -> Figures:
    """Feeds the inputs 0..inputs-1 to one reader, restarting its process as needed."""
    figures = Figures()
    begin = 0
    while begin < inputs:
        for result in _watched(name, seed, begin, inputs, folder):
            figures.add(result)
            begin = result["index"] + 1
    return figures


def _watched(name: str, seed: int, begin: int, end: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Results of one process, and one made here for the input that killed it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.reliability.child",
        name,
        str(seed),
        str(begin),
        str(end),
        str(folder),
    ]
    environment = {
        **os.environ,
        "VIRNUC_HOME": str(folder),
        "PREFECT_HOME": f"{folder}/prefect",
        "OMP_NUM_THREADS": "1",
    }
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        index, failure = -1, "crash"
        for line in _lines(process):
            if line is None:
                failure = "hang"
                process.kill()
                break
            if "begun" in line:
                index = line["begun"]
            elif "index" in line:
                index = -1
                yield line
        code = process.wait()
        if index < 0 and code == 0:
            return
        errors.seek(0)
        said = errors.read()[-400:].decode(errors="replace")
        if index < 0:
            raise RuntimeError(f"the process for {name} ended with {code}: {said}")
        yield {
            "index": index,
            "input": f"input {index}",
            "outcome": failure,
            "message": f"exit code {code}: {said}",
        }


def _lines(process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any] | None]:
    """The process's output lines; None when an input takes too long."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    os.set_blocking(output, False)
    waiting = b""
    allowed, said, used = _START_SECONDS, time.monotonic(), 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if selector.select(1.0):
                block = os.read(output, 1 << 16)
                if not block:
                    return
                *lines, waiting = (waiting + block).split(b"\n")
                yield from map(json.loads, lines)
                allowed, said, used = MOST_SECONDS, time.monotonic(), _processor_seconds(process.pid)
            elif time.monotonic() - said > allowed * _WALL_FACTOR or (
                _processor_seconds(process.pid) - used > allowed
            ):
                yield None


def _processor_seconds(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / _TICKS


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument(
        "--reader", action="append", choices=[reader.name for reader in READERS], metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "reliability" / "fuzz.json"
    )
    arguments = parser.parse_args(argv)
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="virnuc-fuzz-") as scratch:
        for name in arguments.reader or [reader.name for reader in READERS]:
            begin = time.monotonic()
            results[name] = fuzz_reader(name, arguments.inputs, arguments.seed, Path(scratch) / "material")
            seconds = time.monotonic() - begin
            print(f"{name}: {dict(results[name].outcomes)} in {seconds:.0f} s", file=sys.stderr, flush=True)
    report = {
        "inputs_each": arguments.inputs,
        "seed": arguments.seed,
        "limits": {"seconds": MOST_SECONDS, "memory_mb": MEMORY_BYTES >> 20},
        "readers": {name: figures.document for name, figures in results.items()},
    }
    print_and_write(report, arguments.out)
    return 0 if all(figures.is_clean for figures in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
