"""Injected operating-system faults, chosen by the number of the call that they hit; see fault_shim.c.

A program that injects faults first calls `load_shim`, which re-executes it with the shim preloaded. All its child
processes then have the shim too, and `Faults` controls all of them.
"""

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Final, NoReturn, Self

from virnuc_core.inference.launcher import CPU_LIBRARIES

_SOURCE: Final = Path(__file__).with_name("fault_shim.c")
_VARIABLE: Final = "VIRNUC_FAULTS"
# Makes a run in this process byte-identical to one with lane processes.
LANE_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", **CPU_LIBRARIES}
# Source: struct faults in fault_shim.c.
_HEAD: Final = struct.Struct("=iiiiiiqqq1024s1024s")
_PASS: Final = 0


class Call(IntFlag):
    """System calls; `OPEN` creates or truncates a file, and `WRITE` includes truncation."""

    READ_OPEN = 1
    OPEN = 2
    WRITE = 4
    FSYNC = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64

    @classmethod
    def changes(cls) -> "Call":
        """Every call that changes or syncs the disk."""
        return cls.OPEN | cls.WRITE | cls.FSYNC | cls.RENAME | cls.UNLINK | cls.MKDIR


KILL: Final = -1
KILL_HALFWAY: Final = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        calls: the calls that count.
        at: the number of the one to hit, from 1.
        action: an errno; `KILL` ends the process group before the call, `KILL_HALFWAY` after half of a write.
        lasting: whether all later calls fail as well.
    """

    calls: Call
    at: int
    action: int
    lasting: bool = False


class Faults:
    """Controls the shim of all processes below one folder."""

    def __init__(self) -> None:
        with open(os.environ[_VARIABLE], "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _HEAD.size)

    @contextmanager
    def injected(
        self, root: Path, fault: Fault | None, *, trace: Path | None = None, clock_jumps: bool = False
    ) -> Iterator[None]:
        """Arms the shim during the block.

        Args:
            root: only calls on paths below it count.
            fault: None counts every call that changes something.
            trace: a new file that gets a line for each call that counts.
            clock_jumps: shifts the time of day at every reading.
        """
        kinds, at, action, lasting = int(Call.changes()), 0, _PASS, False
        if fault is not None:
            kinds, at, action, lasting = int(fault.calls), fault.at, fault.action, fault.lasting
        places = (str(root).encode(), str(trace or "").encode())
        self._write((1, kinds, action, int(lasting), int(clock_jumps), 0, at, 0, 0, *places))
        try:
            yield
        finally:
            self._write((0, *_HEAD.unpack(self._shared[:])[1:]))

    @property
    def count(self) -> int:
        """Counted calls since the last block began."""
        return int(_HEAD.unpack(self._shared[:])[7])

    @property
    def hits(self) -> int:
        """Calls that were hit."""
        return int(_HEAD.unpack(self._shared[:])[8])

    def _write(self, values: tuple[int | bytes, ...]) -> None:
        self._shared[:] = _HEAD.pack(*values)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A line of a trace: call, path, and the new path of a rename."""

    kind: str
    path: Path
    new_path: Path | None = None

    @classmethod
    def read(cls, trace: Path) -> list[Self]:
        """All lines of a trace."""
        calls = []
        for line in trace.read_text().splitlines() if trace.exists() else ():
            kind, path, *rest = line.split("\t")
            calls.append(cls(kind, Path(path), Path(rest[0]) if rest else None))
        return calls


def compiler() -> str | None:
    """The C compiler of this machine."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def shim_environment(folder: Path) -> dict[str, str]:
    """Builds the shim in a folder; returns the environment that preloads it.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    program = compiler()
    if program is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc, clang), which faults are injected with")
    shim, control = folder / "fault_shim.so", folder / "control"
    subprocess.run([program, "-O2", "-shared", "-fPIC", "-o", str(shim), str(_SOURCE)], check=True)
    control.write_bytes(bytes(_HEAD.size))
    homes = {"PREFECT_HOME": f"{folder}/prefect", "VIRNUC_HOME": f"{folder}/home"}
    return {**LANE_ENVIRONMENT, **homes, "LD_PRELOAD": str(shim), _VARIABLE: str(control)}


def load_shim(module: str) -> None:
    """Re-executes this program, started as `python -m module`, with the shim unless it has it."""
    if _VARIABLE not in os.environ:
        with tempfile.TemporaryDirectory(prefix="virnuc-faults-") as folder:
            _start_over(module, shim_environment(Path(folder)))


def start_as_a_lane(module: str) -> None:
    """Re-executes this program, started as `python -m module`, in the environment of a lane unless it has it."""
    if not LANE_ENVIRONMENT.items() <= os.environ.items():
        _start_over(module, LANE_ENVIRONMENT)


def _start_over(module: str, environment: Mapping[str, str]) -> NoReturn:
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, **environment}).returncode)
