"""Files that are either whole or absent, whenever the process or the machine stops."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary name to write to; it becomes `path` when the block ends without an error.

    The content is on the disk before the name is, and the name is on the disk when this returns. The
    temporary name is fixed, so what a killed process leaves behind is overwritten by its successor.

    Args:
        path: where the file shall be; an older file there is replaced.

    Yields:
        A path in the same folder, to be created by the caller.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` under which its content is written first."""
    return path.with_name(f".{path.name}.tmp")


def sync_file(path: Path) -> None:
    """Waits until the content of a closed file is on the disk."""
    _fsync(path, os.O_RDWR)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
