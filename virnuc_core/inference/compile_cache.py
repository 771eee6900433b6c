"""The code that torch, Triton and flash-attn-4 compile, kept from run to run under the home folder, and kept small.

Nothing here imports torch: all read the environment when they are first imported.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from virnuc_core.env_config import env

_LOCK_NAME: Final = ".lock"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A folder of the cache with the files right in it, which belong together.

    Attributes:
        last_used: newest time of writing or reading, in seconds of the clock.
        folder: where it is.
        files: its files.
        size: bytes of all of them.
    """

    last_used: float
    folder: Path
    files: tuple[Path, ...]
    size: int


def compile_cache_environment() -> dict[str, str]:
    """Variables that make torch, Triton and flash-attn-4 keep compiled code under the home folder, or where they are told."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": env().inductor_cache or str(_cache_folder() / "inductor"),
        "TRITON_CACHE_DIR": env().triton_cache or str(_cache_folder() / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(_cache_folder() / "flash-attn"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }


@contextmanager
def using_compile_cache() -> Iterator[None]:
    """A block that may compile, and read what was compiled before; at its end the cache is trimmed.

    Not while another process is in such a block, which may be about to open what would be removed: the last one trims.
    Where files cannot be locked, nothing is removed.
    """
    with ExitStack() as stack:
        lock = None
        try:
            _cache_folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((_cache_folder() / _LOCK_NAME).open("a"))
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            _log.info("compiled code in %s is not trimmed: %s", _cache_folder(), error)
        yield
        if lock is not None and _is_last(lock):
            trim_compile_cache()


def trim_compile_cache() -> int:
    """Removes the entries used longest ago until the cache is within its limit, and logs its size.

    Folders that the user has named are left alone.

    Returns:
        Bytes that are left.
    """
    entries = sorted(_entries(_cache_folder()), key=lambda entry: entry.last_used)
    size, limit = sum(entry.size for entry in entries), env().compile_cache_gb * 1e9
    num_removed = 0
    for entry in entries:
        if size <= limit:
            break
        _remove(entry)
        num_removed += 1
        size -= entry.size
    if entries:
        _log.info(
            "compiled code in %s: %.3f GB in %d entries, at most %g GB; %d entries removed",
            _cache_folder(),
            size / 1e9,
            len(entries) - num_removed,
            env().compile_cache_gb,
            num_removed,
        )
    return size


def _is_last(lock: TextIO) -> bool:
    """Whether nobody else has the lock, which is exclusive then."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _cache_folder() -> Path:
    return env().home / "compiled"


def _entries(cache: Path) -> Iterator[_Entry]:
    """Everything in the cache but empty files, which are locks; other processes may be at work in it."""
    for folder, _, names in os.walk(cache):
        found = [(path, status) for name in names if (status := _status(path := Path(folder, name)))]
        if size := sum(status.st_size for _, status in found):
            yield _Entry(
                last_used=max(max(status.st_atime, status.st_mtime) for _, status in found),
                folder=Path(folder),
                files=tuple(path for path, _ in found),
                size=size,
            )


def _status(path: Path) -> os.stat_result | None:
    """Size and times of a file; None when another process has just removed it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _remove(entry: _Entry) -> None:
    for file in entry.files:
        file.unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it, or has just come
        entry.folder.rmdir()
