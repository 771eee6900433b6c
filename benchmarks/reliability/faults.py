"""Faults of the operating system, chosen by the number of the call that they hit; see fault_shim.c.

A program that injects faults calls `load_shim` first, which starts it over with the shim below everything else. All
processes that it starts then have the shim too, and `Faults` says to all of them what is to happen.
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
# A run in this program gives the same bytes then as one with processes for its lanes.
LANE_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", **CPU_LIBRARIES}
# As struct faults in the C source.
_HEAD: Final = struct.Struct("=iiiiiiqqq1024s1024s")
_PASS: Final = 0


class Call(IntFlag):
    """Calls to the operating system; `OPEN` makes or empties a file, and `WRITE` is also what cuts one."""

    READ_OPEN = 1
    OPEN = 2
    WRITE = 4
    FSYNC = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64

    @classmethod
    def changes(cls) -> "Call":
        """Everything that changes what is on the disk, or makes sure of it."""
        return cls.OPEN | cls.WRITE | cls.FSYNC | cls.RENAME | cls.UNLINK | cls.MKDIR


KILL: Final = -1
KILL_HALFWAY: Final = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is to happen.

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
    """What the processes with the shim are to meet below one folder."""

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
            fault: what is to happen; None counts every call that changes something.
            trace: a new file that gets a line for each call that counts.
            clock_jumps: whether the time of day is wrong, each time by another amount.
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
        """Calls that counted since the last block began."""
        return int(_HEAD.unpack(self._shared[:])[7])

    @property
    def hits(self) -> int:
        """Those of them that were hit."""
        return int(_HEAD.unpack(self._shared[:])[8])

    def _write(self, values: tuple[int | bytes, ...]) -> None:
        self._shared[:] = _HEAD.pack(*values)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A line of a trace: what was called, on which path, and for a rename the new one."""

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
    """Builds the shim in a folder; the environment of a program that is to have it.

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
    """Starts this program over with the shim, unless it has it.

    Args:
        module: what was started with `python -m`.
    """
    if _VARIABLE not in os.environ:
        with tempfile.TemporaryDirectory(prefix="virnuc-faults-") as folder:
            _start_over(module, shim_environment(Path(folder)))


def start_as_a_lane(module: str) -> None:
    """Starts this program over in the environment of a lane, unless it has it.

    Args:
        module: what was started with `python -m`.
    """
    if not LANE_ENVIRONMENT.items() <= os.environ.items():
        _start_over(module, LANE_ENVIRONMENT)


def _start_over(module: str, environment: Mapping[str, str]) -> NoReturn:
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, **environment}).returncode)
