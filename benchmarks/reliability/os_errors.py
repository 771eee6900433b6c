"""Makes every call of a small run fail, one after another, and continues the run: the outputs must be those of any other run.

    python -m benchmarks.reliability.os_errors [--number N]

Each call that opens, writes, syncs, renames, deletes or makes something below the run's folder fails once with each of
ENOSPC, EIO and EACCES, and, for a full disk, all later ones with it. `--number` takes that many cases, evenly spread, instead
of all. A call fails where it is made, also within the HDF5 library (fault_shim.c).
"""

import argparse
import errno
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.cases import Outcome, run_case
from benchmarks.reliability.faults import Call, Fault, Faults, TracedCall, load_shim
from benchmarks.reliability.small_run import final_files, make_material, run
from benchmarks.reports import print_and_write

RECORDS: Final = 40
SHARD_SECONDS: Final = 0.003
_ERRNOS: Final = (errno.ENOSPC, errno.EIO, errno.EACCES)
_CALLS: Final = {
    "open": Call.READ_OPEN | Call.OPEN,
    "write": Call.WRITE,
    "fsync": Call.FSYNC,
    "rename": Call.RENAME,
    "unlink": Call.UNLINK,
    "mkdir": Call.MKDIR,
}
# What a person may read when something of the machine fails.
_DOCUMENTED: Final = frozenset({2, 3, 4, 5, 6})


def iter_faults(counts: dict[str, int]) -> Iterator[tuple[str, Fault]]:
    """Every fault for a run with so many calls of each kind, with a name for it."""
    for name, calls in _CALLS.items():
        for at in range(1, counts[name] + 1):
            for number in _ERRNOS:
                yield f"{name} {errno.errorcode[number]}", Fault(calls=calls, at=at, action=number)
    full = Call.OPEN | Call.WRITE | Call.MKDIR
    for at in range(1, sum(counts[name] for name in ("write", "mkdir")) + 1, 2):
        yield "disk full from then on", Fault(calls=full, at=at, action=errno.ENOSPC, lasting=True)


class Laboratory:
    """A folder with the material of a run, and what an undisturbed run makes of it."""

    def __init__(self, scratch: Path, faults: Faults) -> None:
        self.faults = faults
        self.made = scratch / "made"
        self.root = scratch / "run"
        self._trace = scratch / "trace"
        make_material(self.made, RECORDS)
        # In this process, so that its forks find everything imported.
        self.work()
        self.expected = final_files(self.root)

    def case(self, fault: Fault | None, root: Path) -> Outcome:
        """One run, or its continuation, in a process of its own."""
        if fault is None:
            return run_case(self.work)
        self._trace.unlink(missing_ok=True)
        with self.faults.injected(root, fault, trace=self._trace):
            return run_case(self.work)

    def work(self) -> None:
        """The run itself."""
        run(self.root, self.made, shard_seconds=SHARD_SECONDS)

    def counts(self) -> dict[str, int]:
        """How many calls of each kind a run has."""
        counts = {}
        for name, calls in _CALLS.items():
            shutil.rmtree(self.root)
            self.case(Fault(calls=calls, at=0, action=0), self.root)
            counts[name] = self.faults.count
        return counts

    def call_hit(self, fault: Fault) -> str:
        """The call that the last fault has hit first."""
        calls = TracedCall.read(self._trace)
        if len(calls) < fault.at:
            return "no call"
        hit = calls[fault.at - 1]
        return f"{hit.kind} {hit.path.relative_to(self.root)}"

    def problem_after(self, fault: Fault) -> tuple[Outcome, str]:
        """What became of a run with a fault, and what is wrong with that, "" if nothing is."""
        shutil.rmtree(self.root, ignore_errors=True)
        outcome = self.case(fault, self.root)
        if outcome.ending not in ("completed", "refused"):
            return outcome, f"{outcome.ending}: {outcome.message}"
        if outcome.ending == "refused" and outcome.exit_code not in _DOCUMENTED:
            return outcome, f"exit code {outcome.exit_code}: {outcome.message}"
        if outcome.ending == "completed" and final_files(self.root) != self.expected:
            return outcome, "completed with other outputs"
        continued = self.case(None, self.root)
        if continued.ending != "completed":
            return outcome, f"does not go on: {continued.message}"
        return outcome, "" if final_files(self.root) == self.expected else "goes on to other outputs"


def measure(laboratory: Laboratory, number: int | None) -> dict[str, Any]:
    """The report: cases by kind of fault, endings by exit code, and what went wrong."""
    counts = laboratory.counts()
    chosen = list(iter_faults(counts))
    if number is not None:
        chosen = chosen[:: max(1, len(chosen) // number)]
    cases: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    failures = []
    for done, (name, fault) in enumerate(chosen):
        outcome, problem = laboratory.problem_after(fault)
        cases[name] += 1
        endings[outcome.ending if outcome.ending != "refused" else f"exit code {outcome.exit_code}"] += 1
        if problem:
            failures.append({"fault": f"{name} at {laboratory.call_hit(fault)}", "problem": problem})
            print(failures[-1], file=sys.stderr, flush=True)
        if done % 100 == 99:
            print(f"{done + 1} of {len(chosen)}: {dict(endings)}", file=sys.stderr, flush=True)
    return {
        "kind": "os_errors",
        "calls": counts,
        "cases": dict(cases),
        "endings": dict(endings),
        "resumed_identical": cases.total() - len(failures),
        "failures": failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Injects, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, help="cases to take; all by default")
    out = Path(__file__).parents[1] / "results" / "reliability_os_errors.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    load_shim("benchmarks.reliability.os_errors")
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="virnuc-os-errors-") as scratch:
        report = measure(Laboratory(Path(scratch), Faults()), arguments.number)
    print_and_write(report, arguments.out)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
