"""Prefect's engine for one run, in a process that goes on when its worker is gone.

A worker reads what its runs print. When it is killed, the next line that Prefect printed would end the run.
"""

import io
import runpy
import sys
from typing import Any, TextIO


class _Unbreakable(io.FileIO):
    """An open file, to which writing is no error when nobody reads it any more."""

    def write(self, data: Any) -> int:
        """Writes, or does nothing."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def unbreakable(stream: TextIO) -> TextIO:
    """Another stream to the same file."""
    file = _Unbreakable(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=True)


if __name__ == "__main__":
    sys.stdout, sys.stderr = unbreakable(sys.stdout), unbreakable(sys.stderr)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
