"""An inbox: sequence files that arrive in a folder, known by their bytes and not by their names."""

import glob
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from virnuc_core.errors import UsageError
from virnuc_core.files import write_text
from virnuc_core.sequences.reader import input_digest

# Other programs and people leave all kinds of files in such folders; the reader itself goes by content.
SUFFIXES: Final = frozenset({".fa", ".fasta", ".fas", ".fna", ".ffn", ".fsa", ".fq", ".fastq"})
COMPRESSIONS: Final = frozenset({".gz", ".bgz", ".zst", ".xz", ".bz2"})
REJECTED: Final = "rejected"

# With the hash and its dash a name of this many letters, of four bytes each, still fits in 255 bytes.
_MAX_STEM: Final = 60
_SECONDS_BETWEEN_SAVES: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A file as it was at one moment.

    Attributes:
        path: where it lies.
        size: bytes.
        mtime_ns: when it was last written, in nanoseconds since 1970.
    """

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> "Look":
        """The file as it is now."""
        found = path.stat()
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns)

    def reason_to_wait(self, settle_seconds: float) -> str | None:
        """Why the file may still be on its way, or None when it seems to have arrived.

        Args:
            settle_seconds: how long nobody must have written to it.
        """
        try:
            if Look.at(self.path) != self:
                return "it changed while the night was at work"
        except FileNotFoundError:
            return "it is not there any more"
        age = time.time() - self.mtime_ns / 1e9
        if settle_seconds > max(age, 0.0):
            return f"it was written {age:.0f} s ago" if age >= 0 else "its time lies in the future: touch it"
        return None


def sample_name(path: Path) -> str | None:
    """The name of a sequence file without what says its format; None for every other kind of file."""
    stem = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    if path.name.startswith(".") or stem.suffix.lower() not in SUFFIXES:
        return None
    return stem.stem


def results_name(path: Path, sha256: str) -> str:
    """The name of the folder of results: for people the sample, for the next night the bytes."""
    return f"{(sample_name(path) or path.name)[:_MAX_STEM]}-{sha256[:12]}"


def iter_inbox(inbox: str) -> Iterator[Look]:
    """Yields the sequence files of an inbox; hidden and other files, folders and rejected files are left out.

    Args:
        inbox: a folder, of which only the files directly in it count, or a glob; `**` goes into subfolders.

    Raises:
        UsageError: there is no such folder.
    """
    folder = Path(inbox)
    if folder.is_dir():
        paths = list(folder.iterdir())
    elif glob.has_magic(inbox):
        found = map(Path, glob.glob(inbox, recursive=True))
        paths = [path for path in found if path.parent.name != REJECTED]
    else:
        raise UsageError(f"inbox {inbox} is not a folder: make it, or give a glob such as '/data/*.fa.gz'.")
    for path in sorted(set(paths)):
        if sample_name(path) is not None and path.is_file():
            with suppress(FileNotFoundError):  # taken away since it was listed
                yield Look.at(path)


def set_aside(path: Path, sha256: str, reason: str) -> Path:
    """Moves a file into the folder `rejected` beside it, with its reason in NAME.reason.txt; gives its new place.

    A file of the same name that is already there stays.
    """
    folder = path.parent / REJECTED
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    if target.exists():
        target = folder / f"{sha256[:12]}-{path.name}"
    # The reason first: a file that is moved has one, whenever the process stops.
    write_text(target.with_name(f"{target.name}.reason.txt"), f"{reason}\n")
    return path.replace(target)


class DigestCache:
    """SHA-256 of files, so that each is read once and not every night; the cache may be deleted at any time.

    Args:
        path: the JSON file: by path the size, the time of the last change and the digest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read_digests(path)
        self._used: dict[str, tuple[int, int, str]] = {}
        self._saved_at = time.monotonic()

    def sha256(self, look: Look) -> str:
        """Hex digest of the bytes of a file.

        Raises:
            InputError: it cannot be read.
        """
        _, size, mtime_ns = astuple(look)
        name = str(look.path)
        entry = self._known.get(name)
        if entry is None or entry[:2] != (size, mtime_ns):
            entry = (size, mtime_ns, input_digest(look.path).sha256)
            if look.reason_to_wait(0.0):
                return entry[2]  # of a file that is being written: true for no size and time
        self._used[name] = entry
        if time.monotonic() - self._saved_at > _SECONDS_BETWEEN_SAVES:
            self._save({**self._known, **self._used})
        return entry[2]

    def save(self) -> None:
        """Keeps the digests that were asked for; those of files that are gone are forgotten."""
        self._save(self._used)

    def _save(self, entries: dict[str, tuple[int, int, str]]) -> None:
        self._saved_at = time.monotonic()
        if entries == self._known:
            return
        try:
            write_text(self._path, json.dumps({"files": entries}, indent=0))
        except OSError as error:  # costs time in the next night, and nothing now
            _log.warning("%s cannot be written (%s): files are read again next time", self._path, error)


@contextmanager
def open_digests(path: Path) -> Iterator[DigestCache]:
    """A cache that is saved as the block ends, however it ends."""
    cache = DigestCache(path)
    try:
        yield cache
    finally:
        cache.save()


def _read_digests(path: Path) -> dict[str, tuple[int, int, str]]:
    try:
        files = json.loads(path.read_bytes())["files"]
        return {
            str(name): (int(size), int(mtime_ns), str(sha256))
            for name, (size, mtime_ns, sha256) in files.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read (%r): every file is read again", path, error)
        return {}
