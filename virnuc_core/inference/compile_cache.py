"""The code that torch, Triton and flash-attn-4 compile, kept from run to run under the home folder, and kept small.

Nothing here imports torch: all read the environment when they are first imported.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from virnuc_core.env_config import env

_LOCK_NAME: Final = ".lock"

_log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A folder of the cache with the files right in it, which belong together."""

    last_used: float
    folder: Path
    files: list[Path]
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
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # somebody else has the lock
            trim_compile_cache()


def trim_compile_cache() -> int:
    """Removes the least recently used entries until the cache is within its limit, and logs its size.

    Folders that the user has named are left alone.

    Returns:
        Bytes that are left.
    """
    entries = sorted(_entries(_cache_folder()))
    size, limit = sum(entry.size for entry in entries), env().compile_cache_gb * 1e9
    num_removed = 0
    for entry in entries:
        if size <= limit:
            break
        for file in entry.files:
            file.unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it, or has just come
            entry.folder.rmdir()
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


def _cache_folder() -> Path:
    return env().home / "compiled"


def _entries(cache: Path) -> Iterator[_Entry]:
    """Everything in the cache but empty files, which are locks; other processes may be at work in it."""
    for folder, _, names in os.walk(cache):
        found: list[tuple[Path, os.stat_result]] = []
        for name in names:
            with suppress(FileNotFoundError):  # another process has just removed it
                found.append((path := Path(folder, name), path.stat()))
        if size := sum(status.st_size for _, status in found):
            last_used = max(max(status.st_atime, status.st_mtime) for _, status in found)
            yield _Entry(last_used, Path(folder), [path for path, _ in found], size)
