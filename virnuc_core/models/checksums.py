"""Whether model files are byte for byte what they should be: lists of SHA-256, and the hub cache's own names.

A folder of files may hold a list `SHA256SUMS` in the format of `sha256sum`, which checks it too. In the cache of the
model hub each file is a link to one that is named by its hash: SHA-256 for large files, Git's SHA-1 for small ones.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.errors import DamagedFileError
from virnuc_core.files import write_text

SUMS_NAME: Final = "SHA256SUMS"
_LINE: Final = re.compile(r"([0-9a-f]{64})[ ][ *]([\w-][\w.-]{0,200})", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HashCheck:
    """One file against the hash that is known of it.

    Attributes:
        file: the file.
        known_from: where the hash is known from; empty when none is.
        problem: what is wrong with the file; empty when nothing is.
    """

    file: Path
    known_from: str
    problem: str = ""


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, files: Iterable[Path]) -> None:
    """Writes the list of files that lie in a folder, by name."""
    lines = sorted((path.name, sha256_of(path)) for path in files)
    write_text(folder / SUMS_NAME, "".join(f"{digest}  {name}\n" for name, digest in lines))


def check_hashes(files: Iterable[Path]) -> Iterator[HashCheck]:
    """Compares files with the lists beside them, or with their names in the hub's cache.

    Raises:
        DamagedFileError: a list cannot be read.
    """
    for path in files:
        sums = path.parent / SUMS_NAME
        if sums.is_file():
            yield _check_listed(path, read_sums(sums))
        elif path.is_symlink() and path.resolve().parent.name == "blobs":
            yield _check_blob(path)
        else:
            yield HashCheck(file=path, known_from="")


def read_sums(path: Path) -> dict[str, str]:
    """SHA-256 by file name.

    Raises:
        DamagedFileError: it is no such list.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode().splitlines()
    except UnicodeDecodeError:
        lines = [""]
    found = [_LINE.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if not all(found) or len(sums) < len(lines):
        raise DamagedFileError(
            f"{path} is not a list of SHA-256 and file names, as sha256sum writes it: fetch it again, or delete it to "
            "do without hashes."
        )
    return sums


def _check_listed(path: Path, sums: dict[str, str]) -> HashCheck:
    known_from = str(path.parent / SUMS_NAME)
    if path.name not in sums:
        return HashCheck(file=path, known_from="", problem=f"{path} is not in {known_from}")
    if not path.is_file():
        return HashCheck(file=path, known_from=known_from, problem=f"{path} is missing")
    same = sha256_of(path) == sums[path.name]
    problem = "" if same else f"{path} is not what it was: its SHA-256 is not that in {known_from}"
    return HashCheck(file=path, known_from=known_from, problem=problem)


def _check_blob(path: Path) -> HashCheck:
    blob = path.resolve()
    if _SHA256.fullmatch(blob.name):
        same = sha256_of(blob) == blob.name
    elif _GIT_SHA1.fullmatch(blob.name):
        content = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        with blob.open("rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
        same = content.hexdigest() == blob.name
    else:
        return HashCheck(file=path, known_from="")
    problem = "" if same else f"{path} is damaged: its content is not what the model hub says"
    return HashCheck(file=path, known_from="the model hub", problem=problem)
