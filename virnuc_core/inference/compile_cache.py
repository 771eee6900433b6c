"""Size-limited cache of code compiled by torch, Triton and flash-attn-4; must not import torch, which reads its variables."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Final, NamedTuple

from virnuc_core.env_config import env, home_folder

_LOCK_NAME: Final = ".lock"

_log = logging.getLogger(__name__)


class CacheEntry(NamedTuple):
    """A folder of the cache and its direct files, removed together."""

    last_used: float
    folder: Path
    files: list[Path]
    size: int


def compile_cache_environment() -> dict[str, str]:
    """Variables that place the caches in the home folder, unless the user has set them."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": env().inductor_cache or str(_cache_folder() / "inductor"),
        "TRITON_CACHE_DIR": env().triton_cache or str(_cache_folder() / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(_cache_folder() / "flash-attn"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }


@cache
def hash_triton() -> None:
    """Starts in the background what Triton's first launch in a process waits half a second for: it hashes its own files.

    The hash, which Triton remembers, is part of the names of compiled kernels in its cache.
    """
    Thread(target=_hash_triton, name="hash-triton", daemon=True).start()


def _hash_triton() -> None:
    with suppress(ImportError):  # then there are no kernels, or Triton has another way of doing this
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def using_compile_cache() -> Iterator[None]:
    """Holds the cache in use; trimmed on exit by the last process to leave, or not at all without file locks."""
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
                return  # still in use by another process
            trim_compile_cache()


def trim_compile_cache() -> int:
    """Removes least recently used entries until within the limit, except in user-chosen folders; returns the bytes left."""
    entries = sorted(iter_entries(_cache_folder()))
    size, limit = sum(entry.size for entry in entries), env().compile_cache_gb * 1e9
    num_removed = 0
    for entry in entries:
        if size <= limit:
            break
        for file in entry.files:
            file.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
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
    return home_folder() / "compiled"


def iter_entries(cache: Path) -> Iterator[CacheEntry]:
    """All of the cache but empty files, which are locks; other processes may be changing it."""
    for folder, _, names in os.walk(cache):
        found: list[tuple[Path, os.stat_result]] = []
        for name in names:
            with suppress(FileNotFoundError):  # another process has just removed it
                found.append((path := Path(folder, name), path.stat()))
        if size := sum(status.st_size for _, status in found):
            last_used = max(max(status.st_atime, status.st_mtime) for _, status in found)
            yield CacheEntry(last_used, Path(folder), [path for path, _ in found], size)
