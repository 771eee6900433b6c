"""Ends a small run with SIGKILL before each of its changes on the disk, then continues it.

    python -m benchmarks.reliability.commit_points [--number N]

A commit point is a call that opens a file for writing, writes, syncs, renames, deletes or makes something below the run's
folder; a write is also broken off halfway. After each, the run is continued three times from what is there: as it is, as it
could be when the power failed and the content of files that were not synced is lost, and the same with names that were not
synced. Each time the outputs must be those of an undisturbed run. One more run sees another time of day at every look at the
clock. `--number` takes that many points, evenly spread.
"""

import argparse
import logging
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.faults import KILL, KILL_HALFWAY, Call, Fault, TracedCall, load_shim
from benchmarks.reliability.laboratory import Laboratory
from benchmarks.reliability.power_loss import Disk
from benchmarks.reports import print_and_write

# A log, of which only complete lines are read; and files that are never written to.
_RECORDS: Final = re.compile(r"lanes/.*|\.virnuc\.lock")
_NUMBERS: Final = re.compile(r"(?<=shard_)\d+|\.[0-9a-f]{16}(?=\.tmp)")
_LOSSES: Final[dict[str, Callable[[Disk], None]]] = {
    "as it is": lambda disk: None,
    "content lost": Disk.lose_content,
    "names lost": Disk.lose_names,
}


def name_of(call: TracedCall, root: Path) -> str:
    """A call without the parts that vary between shards."""
    return f"{call.kind} {_NUMBERS.sub('', str((call.new_path or call.path).relative_to(root)))}"


def iter_points(calls: Sequence[TracedCall]) -> Iterable[tuple[str, int, Fault]]:
    """Each fault with its name and the number of calls before it."""
    writes = 0
    for number, call in enumerate(calls, 1):
        yield "before", number - 1, Fault(calls=Call.changes(), at=number, action=KILL)
        if call.kind == "write":
            writes += 1
            yield "halfway", number, Fault(calls=Call.WRITE, at=writes, action=KILL_HALFWAY)


def unsynced_at_the_end(calls: Iterable[TracedCall], root: Path) -> list[str]:
    """What a finished run could still lose in a power failure, except logs."""
    disk = Disk.after(calls)
    # The folder's own name is in a parent that does not count.
    paths = {*disk.unsynced_content, *disk.unsynced_names} - {root}
    names = {str(path.relative_to(root)) for path in paths}
    return sorted(name for name in names if not _RECORDS.fullmatch(name))


def measure(laboratory: Laboratory, number: int | None) -> dict[str, Any]:
    """Kills and resumptions by commit point, and problems."""
    laboratory.disturbed(None)
    calls = laboratory.calls()
    points = list(iter_points(calls))
    if number is not None:
        points = points[:: max(1, len(points) // number)][:number]
    kills: Counter[str] = Counter()
    continued: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory(prefix="virnuc-killed-") as scratch:
        killed = Path(scratch) / "run"
        for done, (when, before, fault) in enumerate(points, 1):
            name = f"{when} {name_of(calls[before if when == 'before' else before - 1], laboratory.root)}"
            ending = laboratory.disturbed(fault).ending
            kills[name] += 1
            if ending != "killed":
                failures.append({"point": name, "problem": f"was not killed but {ending}"})
                continue
            disk = Disk.after(laboratory.calls()[:before] if when == "before" else laboratory.calls())
            if laboratory.root.exists():
                shutil.copytree(laboratory.root, killed, symlinks=True)
            for loss, apply in _LOSSES.items():
                shutil.rmtree(laboratory.root, ignore_errors=True)
                if killed.exists():
                    shutil.copytree(killed, laboratory.root, symlinks=True)
                apply(disk)
                if problem := laboratory.problem_with_continuing():
                    failures.append({"point": name, "loss": loss, "problem": problem})
                    print(failures[-1], file=sys.stderr, flush=True)
                else:
                    continued[loss] += 1
            shutil.rmtree(killed, ignore_errors=True)
            if done % 50 == 0:
                print(f"{done} of {len(points)}, {len(failures)} failures", file=sys.stderr, flush=True)
    outcome = laboratory.disturbed(None, clock_jumps=True)
    return {
        "kind": "commit_points",
        "with_a_jumping_clock": laboratory.difference() or outcome.ending,
        "calls": len(calls),
        "kills": kills.total(),
        "points": len(kills),
        "continued_identical": dict(continued),
        "unsynced_at_the_end": unsynced_at_the_end(calls, laboratory.root),
        "kills_by_point": dict(sorted(kills.items())),
        "failures": failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, help="points to take; all by default")
    out = Path(__file__).parents[1] / "results" / "reliability" / "commit_points.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    load_shim("benchmarks.reliability.commit_points")
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="virnuc-commit-points-") as scratch:
        report = measure(Laboratory(Path(scratch)), arguments.number)
    print_and_write(report, arguments.out)
    is_clean = not report["failures"] and not report["unsynced_at_the_end"]
    return 0 if is_clean and report["with_a_jumping_clock"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
