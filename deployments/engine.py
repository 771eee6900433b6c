"""Prefect's engine for one flow run, in a process that survives its worker and holds locks.

The worker reads the run's output; once it is killed, a broken pipe would end the run at its next line. The locks (files,
the arguments) are held until the process ends: no other run gets the device earlier, and a restarted worker sees which
runs are alive.
"""

import fcntl
import io
import runpy
import sys
from typing import Any, TextIO


class _Unbreakable(io.FileIO):
    """An open file that ignores a broken pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def unbreakable(stream: TextIO) -> TextIO:
    """Duplicates a stream; the copy ignores a broken pipe."""
    file = _Unbreakable(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=True)


if __name__ == "__main__":
    sys.stdout, sys.stderr = unbreakable(sys.stdout), unbreakable(sys.stderr)
    locks = [open(path, "w") for path in sys.argv[1:]]  # noqa: SIM115 - held by this process until it ends
    del sys.argv[1:]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
