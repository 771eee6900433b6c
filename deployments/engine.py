"""Prefect's engine for one flow run, in a process that survives its worker and holds a lock on its device.

The worker reads the run's output; once it is killed, a broken pipe would end the run at its next line. The lock (a
file, the only argument) is held until the process ends, so no other run gets the device earlier.
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
    if len(sys.argv) > 1:
        device_lock = open(sys.argv.pop(1), "w")  # noqa: SIM115 - held by this process until it ends
        fcntl.flock(device_lock, fcntl.LOCK_EX)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
