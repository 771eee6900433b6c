"""Faults of the operating system at every change that a small run makes on the disk, each of which it must survive.

    python -m benchmarks.reliability.faults [--number N]

A change is a call that opens a file for writing, writes, syncs, renames, deletes or makes something below the run's folder,
also within the HDF5 library (fault_shim.c). Before each of them, and in the middle of each write, the run is killed, and then
resumed from what is there: as it is, as it could be when the power failed and the content of files that were not synced is
lost, and the same with names that were not synced. Then each of them fails with ENOSPC, EIO and EACCES, and the full disk stays
full. A run must end with a result or with an error of virnuc's own, and be resumed to the outputs of an undisturbed one.
`--number` takes that many cases of each kind, evenly spread.
"""

import errno
import mmap
import os
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.harness import Outcome, SmallRun, main, run_forked, say
from benchmarks.reports import options_of

_SOURCE: Final = Path(__file__).with_name("fault_shim.c")
_VARIABLE: Final = "VIRNUC_FAULTS"
# Source: struct faults in fault_shim.c.
_CONTROL: Final = struct.Struct("=iiiiqqq1024s1024s")
PASS: Final = 0
KILL: Final = -1
KILL_HALFWAY: Final = -2
# A log, of which only complete lines are read; and a file that is never written to.
_NOT_SYNCED: Final = re.compile(r"lanes/.*|\.virnuc\.lock")
_ERRNOS: Final = (errno.ENOSPC, errno.EIO, errno.EACCES)
# Exit codes for failures of the machine, in docs/cli.md.
_DOCUMENTED: Final = (2, 3, 4, 5, 6)


class Call(IntFlag):
    """System calls; `OPEN` creates or truncates a file, and `WRITE` includes truncation."""

    OPEN = 2
    WRITE = 4
    FSYNC = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        calls: the calls that count and are traced.
        at: the number of the one to hit, from 1.
        action: an errno; `KILL` ends the process group before the call, `KILL_HALFWAY` after half of a write.
        lasting: whether all later calls fail as well.
    """

    calls: Call = ~Call(0)
    at: int = 0
    action: int = PASS
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class TracedCall:
    kind: str
    path: Path
    new_path: Path | None = None


class FaultyRun:
    """Runs a small run with a fault in calls below its folder; `calls` are those counted last, the one hit included."""

    def __init__(self, small_run: SmallRun, trace: Path) -> None:
        self._run, self._trace = small_run, trace
        self.calls: list[TracedCall] = []
        with open(os.environ[_VARIABLE], "r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)

    def run(self, fault: Fault) -> Outcome:
        self._run.clear()
        self._trace.unlink(missing_ok=True)
        settings = (fault.calls, fault.action, fault.lasting, fault.at, 0, 0)
        paths = (str(self._run.root).encode(), str(self._trace).encode())
        self._control[:] = _CONTROL.pack(1, *settings, *paths)
        try:
            return run_forked(self._run.work)
        finally:
            self._control[:] = bytes(_CONTROL.size)
            lines = self._trace.read_text().splitlines() if self._trace.exists() else []
            self.calls = [
                TracedCall(kind, *map(Path, paths)) for kind, *paths in (line.split("\t") for line in lines)
            ]


def shim_environment(folder: Path) -> dict[str, str]:
    """Builds the library in a folder with the C compiler `cc`; returns the environment that preloads it."""
    shim, control = folder / "fault_shim.so", folder / "control"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shim, _SOURCE], check=True)  # noqa: S607
    control.write_bytes(bytes(_CONTROL.size))
    return {"LD_PRELOAD": str(shim), _VARIABLE: str(control)}


class Disk:
    """What a power failure after some calls may take from the disk.

    Attributes:
        unsynced_content: files written since they were last synced.
        pending: name changes, in order, in folders not synced since.
    """

    def __init__(self, calls: Iterable[TracedCall]) -> None:
        self.unsynced_content: set[Path] = set()
        self.pending: list[TracedCall] = []
        for call in calls:
            self._add(call)

    @property
    def unsynced(self) -> set[Path]:
        return self.unsynced_content | {call.new_path or call.path for call in self.pending}

    def lose_content(self) -> None:
        for path in self.unsynced_content:
            if path.is_file():
                os.truncate(path, 0)

    def lose_names(self) -> None:
        for call in reversed(self.pending):
            if call.kind == "rename" and call.new_path is not None and call.new_path.exists():
                call.path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(call.new_path, call.path)
            elif call.kind == "mkdir":
                shutil.rmtree(call.path, ignore_errors=True)
            elif call.kind == "open":
                call.path.unlink(missing_ok=True)

    def _add(self, call: TracedCall) -> None:
        match call.kind:
            case "open":
                self.unsynced_content.add(call.path)
                self.pending.append(call)
            case "mkdir":
                self.pending.append(call)
            case "write":
                self.unsynced_content.add(call.path)
            case "fsync":
                self.unsynced_content.discard(call.path)
                self.pending = [p for p in self.pending if (p.new_path or p.path).parent != call.path]
            case "unlink":
                self.unsynced_content.discard(call.path)
                self.pending = [p for p in self.pending if (p.new_path or p.path) != call.path]
            case "rename" if call.new_path is not None:
                self._rename(call.path, call.new_path)
                self.pending.append(call)

    def _rename(self, old: Path, new: Path) -> None:
        """Also renames everything below a folder; a temporary name is not tracked."""

        def moved(path: Path) -> Path:
            return new / path.relative_to(old) if path == old or old in path.parents else path

        self.unsynced_content = {moved(path) for path in self.unsynced_content}
        self.pending = [
            replace(call, path=moved(call.path), new_path=call.new_path and moved(call.new_path))
            for call in self.pending
            if (call.new_path or call.path) != old
        ]


_LOSSES: Final[dict[str, Callable[[Disk], None]]] = {
    "as it is": lambda disk: None,
    "content lost": Disk.lose_content,
    "names lost": Disk.lose_names,
}


def spread(cases: Sequence[Any], number: int | None) -> Sequence[Any]:
    """So many of the cases, evenly spread; None takes all."""
    return cases if number is None else cases[:: max(1, len(cases) // number)][:number]


def iter_kills(calls: Sequence[TracedCall]) -> Iterator[tuple[int, Fault]]:
    """Each kill with the number of calls done by then."""
    for number, call in enumerate(calls, 1):
        yield number - 1, Fault(at=number, action=KILL)
        if call.kind == "write":
            yield number, Fault(at=number, action=KILL_HALFWAY)


def iter_errors(counts: Counter[str]) -> Iterator[Fault]:
    """Every call fails once with every error; for a full disk, all calls from one on."""
    for call in Call:
        for at in range(1, counts[str(call.name).lower()] + 1):
            yield from (Fault(calls=call, at=at, action=number) for number in _ERRNOS)
    full = Call.OPEN | Call.WRITE | Call.MKDIR
    for at in range(1, counts["write"] + counts["mkdir"] + 1, 2):
        yield Fault(calls=full, at=at, action=errno.ENOSPC, lasting=True)


def measure_kills(run: SmallRun, faulty: FaultyRun, scratch: Path, number: int | None) -> dict[str, Any]:
    faulty.run(Fault())
    calls, left = faulty.calls, scratch / "left"
    kills = spread(list(iter_kills(calls)), number)
    resumed: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for before, fault in kills:
        ending = faulty.run(fault).ending
        call = str(faulty.calls[-1])
        if ending != "killed":
            failures.append({"call": call, "problem": f"was not killed but {ending}"})
            continue
        disk = Disk(faulty.calls[:before])
        shutil.rmtree(left, ignore_errors=True)
        if run.root.exists():
            shutil.copytree(run.root, left, symlinks=True)
        for loss, lose in _LOSSES.items():
            run.clear()
            if left.exists():
                shutil.copytree(left, run.root, symlinks=True)
            lose(disk)
            if problem := run.problem_with_resuming():
                failures.append({"call": call, "loss": loss, "problem": problem})
                say(failures[-1])
            else:
                resumed[loss] += 1
    # The folder's own name is in a parent that does not count.
    names = {str(path.relative_to(run.root)) for path in Disk(calls).unsynced - {run.root}}
    unsynced = sorted(name for name in names if not _NOT_SYNCED.fullmatch(name))
    failures += [{"call": "the end", "problem": f"{name} is not synced"} for name in unsynced]
    return {"kills": len(kills), "continued_identical": dict(resumed), "failures": failures}


def measure_errors(run: SmallRun, faulty: FaultyRun, number: int | None) -> dict[str, Any]:
    faulty.run(Fault())
    faults = spread(list(iter_errors(Counter(call.kind for call in faulty.calls))), number)
    endings: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for fault in faults:
        outcome = faulty.run(fault)
        endings[f"exit code {outcome.exit_code}" if outcome.exit_code else outcome.ending] += 1
        if problem := problem_after(outcome, run):
            what = f"{fault} {faulty.calls[fault.at - 1 :][:1]}"
            failures.append({"fault": what, "problem": problem})
            say(failures[-1])
    return {"cases": len(faults), "endings": dict(endings), "failures": failures}


def problem_after(outcome: Outcome, run: SmallRun) -> str:
    """What is wrong with the outcome of a run with a fault, or with what is resumed from it; "" if nothing is."""
    if outcome.ending not in ("completed", "refused"):
        return f"{outcome.ending}: {outcome.message}"
    if outcome.ending == "refused" and outcome.exit_code not in _DOCUMENTED:
        return f"exit code {outcome.exit_code}: {outcome.message}"
    if outcome.ending == "completed" and (difference := run.difference()):
        return f"completed with other outputs: {difference}"
    return run.problem_with_resuming()


def measure(scratch: Path, number: int | None) -> dict[str, Any]:
    run = SmallRun(scratch)
    faulty = FaultyRun(run, scratch / "trace")
    kills = measure_kills(run, faulty, scratch, number)
    errors = measure_errors(run, faulty, number)
    return {"kills": kills, "errors": errors, "failures": [*kills["failures"], *errors["failures"]]}


if __name__ == "__main__":
    parser = options_of("reliability.faults", __doc__)
    parser.add_argument("--number", type=int, help="cases of each kind; all by default")
    main(parser, measure, shim_environment)
