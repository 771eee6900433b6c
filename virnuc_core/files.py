"""Crash-safe files, either complete or absent, and typed JSON."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from virnuc_core.errors import UsageError

Record = TypeVar("Record")


@contextmanager
def atomic_path(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields a temporary path that is renamed to `path` if the block succeeds; content, then name, are synced to disk.

    With `shared`, other processes may write the same file: the temporary name is unique, and leftovers of killed
    processes are for `remove_temporaries`. Otherwise it is fixed, and the next writer overwrites it. A link stays, and its
    target is replaced. A device or pipe is yielded itself, to be written through.
    """
    if is_stream(path):
        with naming(path):
            yield path
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp") if shared else temporary_name(path)
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


def is_stream(path: Path) -> bool:
    """Whether a path leads to a device, pipe or socket."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def require_utf8(*names: str) -> None:
    """Raises UsageError for a path whose bytes are not UTF-8, which tables and JSON cannot hold, or that no file can have."""
    for name in names:
        if any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in name):
            raise UsageError(f"the name {name!r} is not UTF-8 or contains a NUL: rename the file or folder.")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Sets this file name on OSErrors of the block that have none."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes a small UTF-8 file atomically; `shared` as for `atomic_path`."""
    with atomic_path(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_private(path: Path, text: str) -> None:
    """Writes a small UTF-8 file atomically, for its owner alone from the first byte on."""
    with atomic_path(path, shared=True) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def make_private(path: Path) -> None:
    """Creates an empty file unless it exists, and takes it away from others, whatever the umask.

    The group keeps it only in a folder that the group may write, such as a home folder that several people share.
    """
    for_group = path.parent.stat().st_mode & stat.S_IWGRP and 0o060
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with suppress(PermissionError):  # of another member of the group
            os.fchmod(descriptor, 0o600 | for_group)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` that its content is written under first."""
    return path.with_name(f".{path.name}.tmp")


def temporary_of(name: str) -> str:
    """Name of the file that a temporary file is for, "" for names of other files."""
    match = re.fullmatch(r"(?s)\.(.+?)(?:\.[0-9a-f]{16})?\.tmp", name)
    return match[1] if match else ""


def remove_temporaries(folder: Path, names: Container[str]) -> None:
    """Removes leftovers of killed processes for these names; nobody may be writing them."""
    for path in folder.glob(".*.tmp"):
        if temporary_of(path.name) in names and path.is_file():
            path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Creates a folder unless it exists, and syncs its parent."""
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flushes a closed file to disk."""
    _fsync(path, os.O_RDWR)


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to disk."""
    _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Digest of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def open_lock(path: Path) -> IO[str]:
    """Opens a lock file, which is created if needed; its content stays.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+", encoding="utf-8")


def try_lock(file: IO[Any]) -> bool:
    """Locks an open file until it is closed or the process ends; False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Parses one JSON object.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or is not an object.
    """

    def integer(digits: str) -> int:
        if len(digits) > 100:
            raise ValueError("it contains a number that is too large")
        return int(digits)

    try:
        document = json.loads(text, parse_int=integer)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    return document


def from_json(kind: type[Record], values: object) -> Record:
    """Converts parsed JSON to a dataclass of numbers, strings, Literals, tuples and dataclasses, each or None.

    Fields with defaults may be missing.

    Raises:
        ValueError: a field is missing, unknown, of another type, or not finite.
    """
    try:
        record: Record = _list_adapter(kind).validate_json(json.dumps([values]))[0]  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"][1:]))
        reasons = {
            "unexpected_keyword_argument": "it is an unknown field",
            "json_invalid": "it contains invalid Unicode",
        }
        raise ValueError(f"{place:.80}: {reasons.get(first['type'], first['msg'])}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return record


@lru_cache(maxsize=64)
def _list_adapter(kind: Any) -> TypeAdapter[list[Any]]:
    # Of a list, since the settings of an adapter do not apply to a dataclass, but to those within.
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return TypeAdapter(list[kind], config=config)
