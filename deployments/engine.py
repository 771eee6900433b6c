"""Prefect's engine for one flow run, in a process that survives its worker and holds a lock on its device.

A worker reads the output of its runs: once it is killed, the next line that Prefect printed would end the run. The
lock (a file, the only argument) is held until the process ends, so that no other run gets the device before.
"""

import fcntl
import io
import runpy
import sys
from typing import Any, TextIO


class _Unbreakable(io.FileIO):
    """An open file that ignores a broken pipe."""

    def write(self, data: Any) -> int:
        """Writes, or does nothing."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def unbreakable(stream: TextIO) -> TextIO:
    """Another stream to the same file, which ignores a broken pipe."""
    file = _Unbreakable(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=True)


if __name__ == "__main__":
    sys.stdout, sys.stderr = unbreakable(sys.stdout), unbreakable(sys.stderr)
    if len(sys.argv) > 1:
        device_lock = open(sys.argv.pop(1), "w")  # noqa: SIM115 - held by this process until it ends
        fcntl.flock(device_lock, fcntl.LOCK_EX)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
