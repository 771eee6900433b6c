"""Faults of the operating system, chosen by the number of the call that they hit (fault_shim.c), and power failures.

The library is preloaded into a program and thus into all its child processes; `FaultyRun` controls all of them.
"""

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntFlag
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from benchmarks.reliability.harness import Outcome
    from benchmarks.reliability.small_run import SmallRun, Way

_SOURCE: Final = Path(__file__).with_name("fault_shim.c")
_VARIABLE: Final = "VIRNUC_FAULTS"
# Source: struct faults in fault_shim.c.
_CONTROL: Final = struct.Struct("=iiiiiiqqq1024s1024s")
PASS: Final = 0
KILL: Final = -1
KILL_HALFWAY: Final = -2


class Call(IntFlag):
    """System calls; `OPEN` creates or truncates a file, and `WRITE` includes truncation."""

    READ_OPEN = 1
    OPEN = 2
    WRITE = 4
    FSYNC = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64


CHANGES: Final = Call.OPEN | Call.WRITE | Call.FSYNC | Call.RENAME | Call.UNLINK | Call.MKDIR


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        calls: the calls that count and are traced.
        at: the number of the one to hit, from 1.
        action: an errno; `KILL` ends the process group before the call, `KILL_HALFWAY` after half of a write.
        lasting: whether all later calls fail as well.
        clock_jumps: shifts the time of day at every reading.
    """

    calls: Call = CHANGES
    at: int = 0
    action: int = PASS
    lasting: bool = False
    clock_jumps: bool = False


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A line of a trace: call, path, and the new path of a rename."""

    kind: str
    path: Path
    new_path: Path | None = None


class FaultyRun:
    """Runs a small run with a fault in calls below its folder; `calls` are those counted last, the one hit included."""

    def __init__(self, small_run: "SmallRun", trace: Path) -> None:
        self._run, self._trace = small_run, trace
        self.calls: list[TracedCall] = []
        with open(os.environ[_VARIABLE], "r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)

    def run(self, fault: Fault, way: "Way" = "inline") -> "Outcome":
        """A new run."""
        self._run.clear()
        self._trace.unlink(missing_ok=True)
        settings = (fault.calls, fault.action, fault.lasting, fault.clock_jumps, 0, fault.at, 0, 0)
        paths = (str(self._run.root).encode(), str(self._trace).encode())
        self._control[:] = _CONTROL.pack(1, *settings, *paths)
        try:
            return self._run.run(way)
        finally:
            self._control[:] = bytes(_CONTROL.size)
            lines = self._trace.read_text().splitlines() if self._trace.exists() else []
            self.calls = [
                TracedCall(kind, *map(Path, paths)) for kind, *paths in (line.split("\t") for line in lines)
            ]


def compiler() -> str | None:
    """The C compiler of this machine."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def shim_environment(folder: Path) -> dict[str, str]:
    """Builds the library in a folder; returns the environment that preloads it.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    program = compiler()
    if program is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc, clang), which faults are injected with")
    shim, control = folder / "fault_shim.so", folder / "control"
    subprocess.run([program, "-O2", "-shared", "-fPIC", "-o", str(shim), str(_SOURCE)], check=True)
    control.write_bytes(bytes(_CONTROL.size))
    return {"LD_PRELOAD": str(shim), _VARIABLE: str(control)}


@dataclass(kw_only=True)
class Disk:
    """What a power failure may take from the disk.

    Attributes:
        unsynced_content: files written since they were last synced.
        pending: name changes, in order, in folders not synced since.
    """

    unsynced_content: set[Path] = field(default_factory=set)
    pending: list[TracedCall] = field(default_factory=list)

    @classmethod
    def after(cls, calls: Iterable[TracedCall]) -> Self:
        """The state after these calls."""
        disk = cls()
        for call in calls:
            disk._add(call)
        return disk

    @property
    def unsynced(self) -> set[Path]:
        """Names whose content may be lost, or which may be missing or outdated."""
        return self.unsynced_content | {call.new_path or call.path for call in self.pending}

    def lose_nothing(self) -> None:
        """Only the processes are gone."""

    def lose_content(self) -> None:
        """Empties every file with unsynced content."""
        for path in self.unsynced_content:
            if path.is_file():
                os.truncate(path, 0)

    def lose_names(self) -> None:
        """Undoes unsynced name changes, last first."""
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
