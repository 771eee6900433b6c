"""Makes every call of a small run fail, one after another, and continues the run: the outputs must be those of any other run.

    python -m benchmarks.reliability.os_errors [--number N]

Each call that opens, writes, syncs, renames, deletes or makes something below the run's folder fails once with each of
ENOSPC, EIO and EACCES; for a full disk, all later ones fail with it. A few runs have a process for their lane, and a few are
runs of the whole command line. `--number` takes that many cases, evenly spread, instead of all. A call fails where it is
made, also within the HDF5 library (fault_shim.c).
"""

import argparse
import errno
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.cases import Outcome
from benchmarks.reliability.faults import Call, Fault, load_shim
from benchmarks.reliability.laboratory import Laboratory, Way
from benchmarks.reports import print_and_write

_ERRNOS: Final = (errno.ENOSPC, errno.EIO, errno.EACCES)
_CALLS: Final = {
    "open": Call.READ_OPEN | Call.OPEN,
    "write": Call.WRITE,
    "fsync": Call.FSYNC,
    "rename": Call.RENAME,
    "unlink": Call.UNLINK,
    "mkdir": Call.MKDIR,
}
# Documented exit codes for failures of the machine.
_DOCUMENTED: Final = frozenset({2, 3, 4, 5, 6})
# Sample size of runs that take ten seconds or more; all others are run.
_SLOW_CASES: Final[dict[Way, int]] = {"lane": 40, "cli": 12}


def count_calls(laboratory: Laboratory) -> dict[str, int]:
    """Calls of a run by kind."""
    laboratory.disturbed(Fault(calls=reduce(or_, _CALLS.values()), at=0, action=0))
    return dict(Counter(call.kind.removeprefix("read-") for call in laboratory.calls()))


def iter_faults(counts: dict[str, int]) -> Iterator[tuple[str, Fault]]:
    """Every fault for a run with these numbers of calls, with its name."""
    for name, calls in _CALLS.items():
        for at in range(1, counts[name] + 1):
            for number in _ERRNOS:
                yield f"{name} {errno.errorcode[number]}", Fault(calls=calls, at=at, action=number)
    full = Call.OPEN | Call.WRITE | Call.MKDIR
    for at in range(1, counts["write"] + counts["mkdir"] + 1, 2):
        yield "full disk", Fault(calls=full, at=at, action=errno.ENOSPC, lasting=True)


def problem_of(laboratory: Laboratory, fault: Fault) -> tuple[Outcome, str]:
    """Outcome of a run with a fault, and what is wrong with it, or ""."""
    outcome = laboratory.disturbed(fault)
    if outcome.ending not in ("completed", "refused"):
        return outcome, f"{outcome.ending}: {outcome.message}"
    if outcome.ending == "refused" and outcome.exit_code not in _DOCUMENTED:
        return outcome, f"exit code {outcome.exit_code}: {outcome.message}"
    if outcome.ending == "completed" and (difference := laboratory.difference()):
        return outcome, f"completed with other outputs: {difference}"
    return outcome, laboratory.problem_with_continuing()


def measure(laboratory: Laboratory, number: int | None) -> dict[str, Any]:
    """Cases by kind of fault, endings by exit code, an example of each message, and problems."""
    counts = count_calls(laboratory)
    chosen = list(iter_faults(counts))
    if number is not None:
        chosen = chosen[:: max(1, len(chosen) // number)][:number]
    cases: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    messages: dict[str, str] = {}
    failures = []
    for done, (name, fault) in enumerate(chosen, 1):
        outcome, problem = problem_of(laboratory, fault)
        ending = outcome.ending if outcome.ending != "refused" else f"exit code {outcome.exit_code}"
        cases[name] += 1
        endings[ending] += 1
        messages.setdefault(f"{name}, {ending}", outcome.message.replace(str(laboratory.root), "RUN"))
        if problem:
            hit = laboratory.calls()[fault.at - 1 :][:1]
            failures.append({"fault": f"{name} {hit}", "problem": problem})
            print(failures[-1], file=sys.stderr, flush=True)
        if done % 100 == 0:
            print(f"{laboratory.way}: {done} of {len(chosen)}: {dict(endings)}", file=sys.stderr, flush=True)
    return {
        "calls": counts,
        "cases": dict(cases),
        "endings": dict(endings),
        "resumed_identical": cases.total() - len(failures),
        "messages": messages,
        "failures": failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--number", type=int, help="cases to take in one process; all, and slow ones, by default"
    )
    out = Path(__file__).parents[1] / "results" / "reliability" / "os_errors.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    load_shim("benchmarks.reliability.os_errors")
    logging.disable()
    numbers: dict[Way, int | None] = {"inline": arguments.number}
    if arguments.number is None:
        numbers |= _SLOW_CASES
    report: dict[str, Any] = {"kind": "os_errors"}
    for way, number in numbers.items():
        with tempfile.TemporaryDirectory(prefix="virnuc-os-errors-") as scratch:
            report[way] = measure(Laboratory(Path(scratch), way), number)
    print_and_write(report, arguments.out)
    return 1 if any(report[way]["failures"] for way in numbers) else 0


if __name__ == "__main__":
    sys.exit(main())
