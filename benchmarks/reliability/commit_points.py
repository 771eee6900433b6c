"""Ends a small run with SIGKILL before each of its changes on the disk, then resumes it.

    python -m benchmarks.reliability.commit_points [--number N]

A commit point is a call that opens a file for writing, writes, syncs, renames, deletes or makes something below the run's
folder; a write is also broken off halfway. After each, the run is resumed three times from what is there: as it is, as it
could be when the power failed and the content of files that were not synced is lost, and the same with names that were not
synced. Each time the outputs must be those of an undisturbed run. One more run sees another time of day at every look at the
clock. `--number` takes that many points, evenly spread.
"""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.faults import KILL, KILL_HALFWAY, Disk, Fault, FaultyRun, TracedCall
from benchmarks.reliability.harness import main, program, say
from benchmarks.reliability.small_run import SmallRun

# A log, of which only complete lines are read; and a file that is never written to.
_NOT_SYNCED: Final = re.compile(r"lanes/.*|\.virnuc\.lock")
_VARYING: Final = re.compile(r"(?<=shard_)\d+|\.[0-9a-f]{16}(?=\.tmp)")
_LOSSES: Final[dict[str, Callable[[Disk], None]]] = {
    "as it is": Disk.lose_nothing,
    "content lost": Disk.lose_content,
    "names lost": Disk.lose_names,
}


def iter_points(calls: Sequence[TracedCall], root: Path) -> Iterator[tuple[str, int, Fault]]:
    """Name of each point, without what varies between shards; number of calls done by then; fault."""
    for number, call in enumerate(calls, 1):
        name = f"{call.kind} {_VARYING.sub('', str((call.new_path or call.path).relative_to(root)))}"
        yield f"before {name}", number - 1, Fault(at=number, action=KILL)
        if call.kind == "write":
            yield f"halfway {name}", number, Fault(at=number, action=KILL_HALFWAY)


def measure(scratch: Path, number: int | None) -> dict[str, Any]:
    """Kills and resumptions by commit point, and problems."""
    run = SmallRun(scratch)
    faulty, left = FaultyRun(run, scratch / "trace"), scratch / "left"
    faulty.run(Fault())
    calls = faulty.calls
    points = list(iter_points(calls, run.root))
    if number is not None:
        points = points[:: max(1, len(points) // number)][:number]
    kills: Counter[str] = Counter()
    resumed: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for name, before, fault in points:
        ending = faulty.run(fault).ending
        kills[name] += 1
        if ending != "killed":
            failures.append({"point": name, "problem": f"was not killed but {ending}"})
            continue
        disk = Disk.after(faulty.calls[:before])
        shutil.rmtree(left, ignore_errors=True)
        if run.root.exists():
            shutil.copytree(run.root, left, symlinks=True)
        for loss, apply in _LOSSES.items():
            run.clear()
            if left.exists():
                shutil.copytree(left, run.root, symlinks=True)
            apply(disk)
            if problem := run.problem_with_resuming():
                failures.append({"point": name, "loss": loss, "problem": problem})
                say(failures[-1])
            else:
                resumed[loss] += 1
        if kills.total() % 50 == 0:
            say(f"{kills.total()} of {len(points)}, {len(failures)} failures")
    ended = faulty.run(Fault(clock_jumps=True))
    with_a_jumping_clock = run.difference() or ended.ending
    if with_a_jumping_clock != "completed":
        failures.append({"point": "a jumping clock", "problem": with_a_jumping_clock})
    # The folder's own name is in a parent that does not count.
    names = {str(path.relative_to(run.root)) for path in Disk.after(calls).unsynced - {run.root}}
    unsynced = sorted(name for name in names if not _NOT_SYNCED.fullmatch(name))
    failures += [{"point": "the end", "problem": f"{name} is not synced"} for name in unsynced]
    return {
        "with_a_jumping_clock": with_a_jumping_clock,
        "calls": len(calls),
        "kills": kills.total(),
        "points": len(kills),
        "continued_identical": dict(resumed),
        "unsynced_at_the_end": unsynced,
        "kills_by_point": dict(sorted(kills.items())),
        "failures": failures,
    }


if __name__ == "__main__":
    parser = program(__doc__, "commit_points")
    parser.add_argument("--number", type=int, help="points to take; all by default")
    main(parser, measure, preload=True)
