"""Runs a command and writes how long it took and how much memory it had.

    python benchmarks/child_usage.py USAGE.json COMMAND...

Peak memory that the kernel reports begins with that of the process that started the command, so this one imports
nothing large. It ends with the exit code of the command. `peak_mb` (10^6 bytes) is that of the largest process.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(usage_path: Path, command: list[str]) -> int:
    """Runs the command; gives its exit code."""
    started = time.perf_counter()
    _, status, usage = os.wait4(subprocess.Popen(command).pid, 0)
    used = {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
    }
    usage_path.write_text(json.dumps(used))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
