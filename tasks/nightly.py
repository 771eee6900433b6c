"""A nightly run: the files of an inbox, identified by their SHA-256 and not by their names, each computed once."""

import fcntl
import glob
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tasks.pages.nightly_page import FileOutcome, FileStatus
from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest

# Other programs and people leave all kinds of files in such folders; the reader itself goes by content.
SUFFIXES: Final = frozenset({".fa", ".fasta", ".fas", ".fna", ".ffn", ".fsa", ".fq", ".fastq"})
COMPRESSIONS: Final = frozenset({".gz", ".bgz", ".zst", ".xz", ".bz2"})
REJECTED: Final = "rejected"
LOCK_NAME: Final = ".virnuc-nightly.lock"
DIGESTS_NAME: Final = ".virnuc-digests.json"

_RESULTS_NAME: Final = re.compile(r".+-([0-9a-f]{12})")
# With the hash and its dash a name of this many letters, of four bytes each, still fits in 255 bytes.
_MAX_STEM: Final = 60
_SECONDS_BETWEEN_SAVES: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSnapshot:
    """A file as it was at one moment: its size in bytes, and the time of its last change in nanoseconds since 1970."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileSnapshot":
        """The file as it is now."""
        found = path.stat()
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns)

    def reason_to_wait(self, settle_seconds: float) -> str | None:
        """Why the file may still be incomplete; None when nobody has written to it for `settle_seconds`."""
        try:
            if FileSnapshot.of(self.path) != self:
                return "it changed during this nightly run"
        except FileNotFoundError:
            return "it is not there any more"
        age = time.time() - self.mtime_ns / 1e9
        if settle_seconds > max(age, 0.0):
            return f"it was written {age:.0f} s ago" if age >= 0 else "its time lies in the future: touch it"
        return None


def sample_name(path: Path) -> str | None:
    """The name of a sequence file without the suffixes of its format; None for every other kind of file."""
    stem = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    if path.name.startswith(".") or stem.suffix.lower() not in SUFFIXES:
        return None
    return stem.stem


def results_name(path: Path, sha256: str) -> str:
    """The name of the folder of results: the sample for people, the hash for the next nightly run."""
    return f"{(sample_name(path) or path.name)[:_MAX_STEM]}-{sha256[:12]}"


def iter_inbox(inbox: str) -> Iterator[FileSnapshot]:
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
            with suppress(FileNotFoundError):  # removed since it was listed
                yield FileSnapshot.of(path)


def quarantine_file(path: Path, sha256: str, reason: str) -> Path:
    """Moves a file into the folder `rejected` beside it, with its reason in NAME.reason.txt; gives its new path.

    A file of the same name that is already there stays.
    """
    folder = path.parent / REJECTED
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    if target.exists():
        target = folder / f"{sha256[:12]}-{path.name}"
    # The reason first: a file that was moved has one, whenever the process stops.
    write_text(target.with_name(f"{target.name}.reason.txt"), f"{reason}\n")
    return path.replace(target)


class DigestCache:
    """SHA-256 of files, so that each is read once and not by every nightly run; saved as its block ends.

    The JSON file `path` may be deleted at any time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read_digests(path)
        self._used: dict[str, tuple[int, int, str]] = {}
        self._saved_at = time.monotonic()

    def __enter__(self) -> "DigestCache":
        return self

    def __exit__(self, *_: object) -> None:
        self._save(self._used)  # digests of files that are gone are forgotten

    def sha256(self, file: FileSnapshot) -> str:
        """Hex digest of the bytes of a file.

        Raises:
            InputError: it cannot be read.
        """
        name = str(file.path)
        entry = self._known.get(name)
        if entry is None or entry[:2] != (file.size, file.mtime_ns):
            entry = (file.size, file.mtime_ns, input_digest(file.path).sha256)
            if file.reason_to_wait(0.0):
                return entry[2]  # of a file that is being written: belongs to no size and time
        self._used[name] = entry
        if time.monotonic() - self._saved_at > _SECONDS_BETWEEN_SAVES:
            self._save({**self._known, **self._used})
        return entry[2]

    def _save(self, entries: dict[str, tuple[int, int, str]]) -> None:
        self._saved_at = time.monotonic()
        if entries == self._known:
            return
        try:
            write_text(self._path, json.dumps({"files": entries}, indent=0))
        except OSError as error:
            _log.warning("%s cannot be written (%s): files are read again next time", self._path, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictResult:
    """How the run over one file ended: its error, or None, and its page, or ""."""

    error: BaseException | None
    link: str


PredictFile = Callable[[Path, Path], PredictResult]
"""Runs predict over a file into a folder."""


@contextmanager
def lock_results(out: Path) -> Iterator[bool]:
    """Creates the folder of results where needed; gives False when another nightly run is using it.

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


class NightlyBatch:
    """The files of one nightly run, and the results of earlier ones.

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
        self._outcomes: dict[str, FileOutcome] = {}  # of this run, by SHA-256

    def process(self, files: Iterable[FileSnapshot]) -> list[FileOutcome]:
        """Computes what is new, one file after the other; what happens to one does not stop the others."""
        outcomes = []
        for file in files:
            outcome = self._process_file(file)
            _log.info("%s: %s %s", outcome.name, outcome.status, outcome.reason)
            outcomes.append(outcome)
        return outcomes

    def _process_file(self, file: FileSnapshot) -> FileOutcome:
        if waiting := self._waiting(file):
            return waiting
        try:
            sha256 = self._digests.sha256(file)
        except InputError as error:
            return self._unfinished(file, "", error)
        duplicate = self._outcomes.get(sha256)
        if duplicate is None:
            outcome = (
                self._waiting(file) or self._finished(file, sha256, "kept") or self._compute(file, sha256)
            )
            if outcome.status != "waiting":
                self._outcomes[sha256] = outcome
            return outcome
        if duplicate.status == "rejected":
            return self._reject(file, sha256, duplicate.reason)
        return replace(
            duplicate,
            path=file.path,
            status="kept" if duplicate.status == "done" else duplicate.status,
            reason=". ".join(filter(None, (f"The same bytes as {duplicate.name}", duplicate.reason))),
            seconds=0.0,
        )

    def _waiting(self, file: FileSnapshot) -> FileOutcome | None:
        reason = file.reason_to_wait(self._settle_seconds)
        return None if reason is None else FileOutcome(path=file.path, status="waiting", reason=reason)

    def _compute(self, file: FileSnapshot, sha256: str) -> FileOutcome:
        if not _is_utf8(file.path):
            return self._reject(file, sha256, "Its path is not valid UTF-8. Rename it.")
        results = self._results.setdefault(sha256[:12], self._out / results_name(file.path, sha256))
        begin = time.monotonic()
        result = self._predict_file(file.path, results)
        seconds = time.monotonic() - begin
        if result.error is not None:
            outcome = self._unfinished(file, sha256, result.error)
        else:
            reason = f"its bytes are not those in {results}: it changed while it was read"
            outcome = self._finished(file, sha256, "done") or FileOutcome(
                path=file.path, status="waiting", reason=reason
            )
        return replace(outcome, seconds=seconds, link=result.link)

    def _finished(self, file: FileSnapshot, sha256: str, status: FileStatus) -> FileOutcome | None:
        """The results for these bytes, under whatever name they came, if there are any."""
        results = self._results.get(sha256[:12])
        counts = None if results is None else _read_counts(RunFolder(results).report, sha256)
        if counts is None:
            return None
        contigs, virus = counts
        return FileOutcome(
            path=file.path, status=status, results=results, contigs=contigs, contigs_virus=virus
        )

    def _unfinished(self, file: FileSnapshot, sha256: str, error: BaseException) -> FileOutcome:
        """A file that is still being written is not bad, and neither is one on a disk that cannot be read."""
        if waiting := self._waiting(file):
            return waiting
        # The reader's errors have those of the disk as their cause.
        cause = error.__cause__
        is_disk_error = isinstance(cause, OSError) and cause.errno is not None
        if isinstance(error, InputError) and not is_disk_error:
            return self._reject(file, sha256, str(error))
        reason = f"{type(error).__name__}: {error}"
        results = self._results.get(sha256[:12])
        return FileOutcome(path=file.path, status="failed", reason=reason, results=results)

    def _reject(self, file: FileSnapshot, sha256: str, reason: str) -> FileOutcome:
        try:
            target = quarantine_file(file.path, sha256, reason)
        except OSError as error:
            reason = f"{reason} It cannot be moved aside: {error}"
            return FileOutcome(path=file.path, status="failed", reason=reason)
        _log.warning("%s", visible(f"{file.path} was moved to {target}: {reason}"))
        return FileOutcome(path=file.path, status="rejected", reason=reason)


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


def _is_utf8(path: Path) -> bool:
    """Whether a path can be the parameter of a run."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
