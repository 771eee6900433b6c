"""Files that are either whole or absent, whenever the process or the machine stops."""

import os
import re
import secrets
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_TEMPORARY: Final = re.compile(r"\.(.+?)(?:\.[0-9a-f]{16})?\.tmp", re.DOTALL)


@contextmanager
def atomic_path(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Gives a temporary name to write to; it becomes `path` when the block ends without an error.

    The content is on the disk before the name is, and the name is on the disk when this returns.

    Args:
        path: where the file shall be; an older file there is replaced.
        shared: another process may be writing the same file, so the temporary name is this call's own, and
            what a killed process leaves behind is for `remove_temporaries`. Otherwise the name is fixed, and
            its successor overwrites it.

    Yields:
        A path in the same folder, to be created by the caller.
    """
    temporary = _own_temporary_name(path) if shared else temporary_name(path)
    with naming(path):
        try:
            yield temporary
            sync_file(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system in the block that name no file get this name."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes a small UTF-8 text file atomically; `shared` as for `atomic_path`."""
    with atomic_path(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` under which its content is written first."""
    return path.with_name(f".{path.name}.tmp")


def iter_temporaries(folder: Path) -> Iterator[tuple[Path, str]]:
    """What processes that were killed, or are still at it, have written in a folder, and the names it was to get."""
    for path in sorted(folder.glob(".*.tmp")):
        if match := _TEMPORARY.fullmatch(path.name):
            yield path, match[1]


def remove_temporaries(folder: Path, names: Container[str]) -> None:
    """Removes what killed processes have left of the files with these names, which nobody may be writing now."""
    for path, name in iter_temporaries(folder):
        if name in names and path.is_file():
            path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Makes a folder where there is none; its name is on the disk when this returns."""
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Waits until the content of a closed file is on the disk."""
    _fsync(path, os.O_RDWR)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _own_temporary_name(path: Path) -> Path:
    """One that no other call gets, on any machine."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
