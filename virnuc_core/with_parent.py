"""Processes that end with the process that started them; as a program, `-m virnuc_core.with_parent COMMAND...`, it becomes one."""

import ctypes
import os
import signal
import sys


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if it hangs; on Linux alone."""
    if sys.platform == "linux":
        is_option_parent_death = 1
        ctypes.CDLL(None).prctl(is_option_parent_death, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (this process becomes the command)
