"""Checks of memory, open files and disks; imports no torch."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.env_config import env
from virnuc_core.errors import storage_error
from virnuc_core.host_memory import free_memory
from virnuc_core.plain_text import visible
from virnuc_core.versions import State

# Required and recommended.
_LEAST_MEMORY_GB: Final = (1.0, 4.0)
_LEAST_DISK_GB: Final = (0.5, 10.0)
_LEAST_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `is_device` is set for GPUs and their software."""

    topic: str
    name: str
    state: State
    found: str
    advice: str = ""
    is_device: bool = False

    @property
    def summary(self) -> str:
        """For the terminal, with the advice on a line of its own."""
        line = f"{self.state:<7}  {self.topic}: {self.name}: {self.found}"
        return visible(f"{line}\n         -> {self.advice}" if self.advice else line)


def host_findings() -> Iterator[Finding]:
    """Memory, open-file limit, and the disks that a run writes to."""
    if (free := free_memory()) is not None:
        advice = "end other programs, or give the job more memory"
        state, advice = _graded(free / 1e9, _LEAST_MEMORY_GB, advice)
        yield Finding("host", "memory", state, f"{free / 1e9:.1f} GB free", advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft < _LEAST_FILES and soft != resource.RLIM_INFINITY:
        advice = f"ulimit -n {min(4 * _LEAST_FILES, hard) if hard > 0 else 4 * _LEAST_FILES}"
        yield Finding("host", "open files", "warning", found, advice)
    else:
        yield Finding("host", "open files", "ok", found)
    folders = {"working folder": Path.cwd(), "VIRNUC_HOME": env().home, "temporary folder": None}
    for name, folder in folders.items():
        yield disk_finding(name, folder)


def disk_finding(name: str, folder: Path | None) -> Finding:
    """Free space, and whether files can be created; a missing home is created by the first run."""
    try:
        folder = folder or Path(tempfile.gettempdir())
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 1e9
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "set VIRNUC_HOME to one that can" if name == "VIRNUC_HOME" else storage_error(error).args[0]
        found = f"{folder or 'no folder for temporary files'} cannot be written ({reason})"
        return Finding("host", name, "problem", found, advice)
    state, advice = _graded(free, _LEAST_DISK_GB, "make room, or work on another disk")
    return Finding("host", name, state, f"{free:.1f} GB free in {folder}", advice)


def _graded(amount: float, least: tuple[float, float], advice: str) -> tuple[State, str]:
    """State and advice for an amount; `least` is what is required and what is recommended."""
    if amount < least[0]:
        return "problem", advice
    return ("warning", advice) if amount < least[1] else ("ok", "")
