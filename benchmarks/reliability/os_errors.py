"""Makes every call of a small run fail, one after another, and resumes the run: the outputs must be those of any other run.

    python -m benchmarks.reliability.os_errors [--number N]

Each call that opens, writes, syncs, renames, deletes or makes something below the run's folder fails once with each of
ENOSPC, EIO and EACCES; for a full disk, all later ones fail with it. A few runs have a process for their lane, and a few are
runs of the whole command line. `--number` takes that many cases, evenly spread, of runs in one process. A call fails where it
is made, also within the HDF5 library (fault_shim.c).
"""

import errno
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.faults import CHANGES, Call, Fault, FaultyRun
from benchmarks.reliability.harness import Outcome, main, program, say
from benchmarks.reliability.small_run import SmallRun, Way

_ERRNOS: Final = (errno.ENOSPC, errno.EIO, errno.EACCES)
_CALLS: Final = {
    "open": Call.READ_OPEN | Call.OPEN,
    "write": Call.WRITE,
    "fsync": Call.FSYNC,
    "rename": Call.RENAME,
    "unlink": Call.UNLINK,
    "mkdir": Call.MKDIR,
}
# Exit codes for failures of the machine, in docs/errors.md.
_DOCUMENTED: Final = (2, 3, 4, 5, 6)
# Sample size of runs that take ten seconds or more; all others are run.
_SLOW_CASES: Final[dict[Way, int | None]] = {"lane": 40, "cli": 12}


def iter_faults(counts: dict[str, int]) -> Iterator[tuple[str, Fault]]:
    """Every fault for a run with these numbers of calls, with its name."""
    for name, calls in _CALLS.items():
        for at in range(1, counts.get(name, 0) + 1):
            for number in _ERRNOS:
                yield f"{name} {errno.errorcode[number]}", Fault(calls=calls, at=at, action=number)
    full = Call.OPEN | Call.WRITE | Call.MKDIR
    for at in range(1, counts["write"] + counts["mkdir"] + 1, 2):
        yield "full disk", Fault(calls=full, at=at, action=errno.ENOSPC, lasting=True)


def problem_after(outcome: Outcome, run: SmallRun, way: Way) -> str:
    """What is wrong with the outcome of a run with a fault, or with what is resumed from it; "" if nothing is."""
    if outcome.ending not in ("completed", "refused"):
        return f"{outcome.ending}: {outcome.message}"
    if outcome.ending == "refused" and outcome.exit_code not in _DOCUMENTED:
        return f"exit code {outcome.exit_code}: {outcome.message}"
    if outcome.ending == "completed" and (difference := run.difference()):
        return f"completed with other outputs: {difference}"
    return run.problem_with_resuming(way)


def measure_way(scratch: Path, way: Way, number: int | None) -> dict[str, Any]:
    """Cases by kind of fault, endings by exit code, an example of each message, and problems."""
    run = SmallRun(scratch)
    faulty = FaultyRun(run, scratch / "trace")
    faulty.run(Fault(calls=CHANGES | Call.READ_OPEN), way)
    counts = dict(Counter(call.kind.removeprefix("read-") for call in faulty.calls))
    chosen = list(iter_faults(counts))
    if number is not None:
        chosen = chosen[:: max(1, len(chosen) // number)][:number]
    cases: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    messages: dict[str, str] = {}
    failures = []
    for name, fault in chosen:
        outcome = faulty.run(fault, way)
        ending = outcome.ending if outcome.ending != "refused" else f"exit code {outcome.exit_code}"
        cases[name] += 1
        endings[ending] += 1
        messages.setdefault(f"{name}, {ending}", outcome.message.replace(str(run.root), "RUN"))
        if problem := problem_after(outcome, run, way):
            failures.append(
                {"way": way, "fault": f"{name} {faulty.calls[fault.at - 1 :][:1]}", "problem": problem}
            )
            say(failures[-1])
        if cases.total() % 100 == 0:
            say(f"{way}: {cases.total()} of {len(chosen)}: {dict(endings)}")
    return {
        "calls": counts,
        "cases": dict(cases),
        "endings": dict(endings),
        "resumed_identical": cases.total() - len(failures),
        "messages": messages,
        "failures": failures,
    }


def measure(scratch: Path, number: int | None) -> dict[str, Any]:
    """The report of each way to run, and the problems of all."""
    numbers: dict[Way, int | None] = {"inline": number, **(_SLOW_CASES if number is None else {})}
    found = {str(way): measure_way(scratch / way, way, most) for way, most in numbers.items()}
    return {**found, "failures": [failure for report in found.values() for failure in report["failures"]]}


if __name__ == "__main__":
    parser = program(__doc__, "os_errors")
    parser.add_argument(
        "--number", type=int, help="cases to take in one process; all, and slow ones, by default"
    )
    main(parser, measure, preload=True)
