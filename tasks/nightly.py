"""A nightly run: the files of an inbox, known by their SHA-256, each computed once."""

import fcntl
import glob
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

from tasks.pages.nightly_page import Outcome, Status
from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest

_log = logging.getLogger(__name__)


# Other programs and people leave all kinds of files in such folders; the reader itself goes by content.
SUFFIXES: Final = frozenset({".fa", ".fasta", ".fas", ".fna", ".ffn", ".fsa", ".fq", ".fastq"})
COMPRESSIONS: Final = frozenset({".gz", ".bgz", ".zst", ".xz", ".bz2"})
REJECTED: Final = "rejected"

# With the hash and its dash a name of this many letters, of four bytes each, still fits in 255 bytes.
_MAX_STEM: Final = 60
_SECONDS_BETWEEN_SAVES: Final = 10.0


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


LOCK_NAME: Final = ".virnuc-nightly.lock"
DIGESTS_NAME: Final = ".virnuc-digests.json"

_RESULTS_NAME: Final = re.compile(r".+-([0-9a-f]{12})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How the run over one file ended: its error, or None, and its page, or ""."""

    error: BaseException | None
    link: str


PredictFile = Callable[[Path, Path], Attempt]
"""Runs predict over a file into a folder."""


@contextmanager
def lock_results(out: Path) -> Iterator[bool]:
    """Makes the folder of results where needed, and gives False when another night is at work there.

    Raises:
        UsageError: it is not a folder or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK_NAME).open("w")
    except OSError as error:
        raise UsageError(f"out {out} cannot be written: {error.strerror}. Choose another folder.") from error
    # The lock ends with the process, however that ends.
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class Night:
    """What is known of the files of one night and of the nights before.

    Args:
        out: the folder of the folders of results.
        digests: the files' SHA-256.
        predict_file: how a file is computed.
        settle_seconds: how long nobody must have written to a file.
    """

    def __init__(
        self, out: Path, digests: DigestCache, predict_file: PredictFile, settle_seconds: float
    ) -> None:
        self._out = out
        self._digests = digests
        self._predict_file = predict_file
        self._settle_seconds = settle_seconds
        self._results = _results_by_hash(out)
        self._of_tonight: dict[str, Outcome] = {}

    def work_through(self, files: Iterable[Look]) -> list[Outcome]:
        """Computes what is new, one file after the other; what happens to one does not stop the others."""
        outcomes = []
        for file in files:
            outcome = self._work_on(file)
            _log.info("%s: %s %s", outcome.name, outcome.status, outcome.reason)
            outcomes.append(outcome)
        return outcomes

    def _work_on(self, file: Look) -> Outcome:
        waiting = self._waiting(file)
        if waiting is not None:
            return waiting
        try:
            sha256 = self._digests.sha256(file)
        except InputError as error:
            return self._unfinished(file, "", error)
        twin = self._of_tonight.get(sha256)
        if twin is None:
            outcome = self._waiting(file) or self._kept(file, sha256) or self._computed(file, sha256)
            if outcome.status != "waiting":
                self._of_tonight[sha256] = outcome
            return outcome
        if twin.status == "rejected":
            return self._rejected(file, sha256, twin.reason)
        status: Status = "kept" if twin.status == "done" else twin.status
        return replace(
            twin,
            path=file.path,
            status=status,
            reason=". ".join(filter(None, (f"The same bytes as {twin.name}", twin.reason))),
            seconds=0.0,
        )

    def _waiting(self, file: Look) -> Outcome | None:
        reason = file.reason_to_wait(self._settle_seconds)
        return None if reason is None else Outcome(path=file.path, status="waiting", reason=reason)

    def _kept(self, file: Look, sha256: str) -> Outcome | None:
        """The results of an earlier night for these bytes, under whatever name they came."""
        return self._finished(file, sha256, "kept")

    def _computed(self, file: Look, sha256: str) -> Outcome:
        if not _is_utf8(file.path):
            return self._rejected(file, sha256, "Its path is not valid UTF-8. Rename it.")
        results = self._results.setdefault(sha256[:12], self._out / results_name(file.path, sha256))
        begin = time.monotonic()
        attempt = self._predict_file(file.path, results)
        seconds = time.monotonic() - begin
        outcome = (
            self._finished(file, sha256, "done")
            if attempt.error is None
            else self._unfinished(file, sha256, attempt.error)
        )
        if outcome is None:
            reason = f"its bytes are not those in {results}: it changed while it was read"
            outcome = Outcome(path=file.path, status="waiting", reason=reason)
        return replace(outcome, seconds=seconds, link=attempt.link)

    def _finished(self, file: Look, sha256: str, status: Status) -> Outcome | None:
        results = self._results.get(sha256[:12])
        counts = None if results is None else _read_counts(RunFolder(results).report, sha256)
        if counts is None:
            return None
        contigs, virus = counts
        return Outcome(path=file.path, status=status, results=results, contigs=contigs, contigs_virus=virus)

    def _unfinished(self, file: Look, sha256: str, error: BaseException) -> Outcome:
        """A file that is still being written is no bad file, and a disk that cannot be read is none either."""
        waiting = self._waiting(file)
        if waiting is not None:
            return waiting
        if _is_fault_of_the_file(error):
            return self._rejected(file, sha256, str(error))
        reason = f"{type(error).__name__}: {error}"
        return Outcome(path=file.path, status="failed", reason=reason, results=self._results.get(sha256[:12]))

    def _rejected(self, file: Look, sha256: str, reason: str) -> Outcome:
        try:
            place = set_aside(file.path, sha256, reason)
        except OSError as error:
            return Outcome(
                path=file.path, status="failed", reason=f"{reason} It cannot be moved aside: {error}"
            )
        _log.warning("%s", visible(f"{file.path} was moved to {place}: {reason}"))
        return Outcome(path=file.path, status="rejected", reason=reason)


def _results_by_hash(out: Path) -> dict[str, Path]:
    """The folders of results by the hash in their names; a finished one wins over others of that hash."""
    found: dict[str, Path] = {}
    for folder in sorted(out.iterdir()):
        match = _RESULTS_NAME.fullmatch(folder.name)
        if match and (match[1] not in found or RunFolder(folder).report.exists()):
            found[match[1]] = folder
    return found


def _read_counts(report: Path, sha256: str) -> tuple[int, int] | None:
    """Contigs, and those called virus, of a finished run over these very bytes; None when there is none."""
    try:
        document = json.loads(report.read_bytes())
        if [file["sha256"] for file in document["inputs"]] != [sha256]:
            return None
        return int(document["counts"]["records"]), int(document["counts"]["contigs_virus"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s is not a report of virnuc (%r): the file is computed again", report, error)
        return None


def _is_fault_of_the_file(error: BaseException) -> bool:
    """Whether trying again cannot help; the reader's errors have those of the disk as their cause."""
    cause = error.__cause__
    return isinstance(error, InputError) and not (isinstance(cause, OSError) and cause.errno is not None)


def _is_utf8(path: Path) -> bool:
    """Whether a path can be the parameter of a run."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
