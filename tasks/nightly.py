"""Nightly run: files of an inbox, identified by SHA-256 instead of name, each computed once.

Several nightly runs may share an inbox and its results.
"""

import errno
import fcntl
import glob
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from tasks.artifacts import show_markdown, show_table
from tasks.pages.markdown import cell, code, table
from virnuc_core.errors import InputError, UnreadableInputError, UsageError
from virnuc_core.files import open_lock, try_lock, write_text
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest

FileStatus = Literal["failed", "rejected", "skipped", "waiting", "done", "kept"]
STATUSES: Final[tuple[FileStatus, ...]] = get_args(FileStatus)  # most urgent first
# An inbox holds other files too; the reader itself goes by content.
SUFFIXES: Final = frozenset({".fa", ".fasta", ".fas", ".fna", ".ffn", ".fsa", ".fq", ".fastq"})
COMPRESSIONS: Final = frozenset({".gz", ".bgz", ".zst", ".xz", ".bz2"})
REJECTED: Final = "rejected"
LOCK_NAME: Final = ".virnuc-nightly.lock"  # in a results folder
DIGESTS_NAME: Final = ".virnuc-digests.json"
MAX_ROWS: Final = 1000  # of a page
MAX_NAMED: Final = 3  # failures in the error of a nightly run
BY_ANOTHER: Final = "another nightly run computed it"

_RESULTS_NAME: Final = re.compile(r".+-([0-9a-f]{12})")
# This many characters of four bytes, a dash and the hash still fit in the 255 bytes of a file name.
_MAX_STEM: Final = 60

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSnapshot:
    """A file at one moment: size in bytes, and modification time in nanoseconds since 1970.

    Attributes:
        link: the symbolic link that the file is, or that a folder above it in the inbox is; it is not followed.
    """

    path: Path
    size: int
    mtime_ns: int
    link: Path | None = None

    @classmethod
    def of(cls, path: Path, root: Path | None = None) -> "FileSnapshot":
        """The file as it is now, in the inbox `root`."""
        found = path.lstat()
        below = [path, *(folder for folder in path.parents if root and root in folder.parents)]
        link = next((each for each in below if each.is_symlink()), None)
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, link=link)

    def reason_to_wait(self, settle_seconds: float) -> str | None:
        """Why the file may still be incomplete; None when it has not changed for `settle_seconds`."""
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
    """The name of a sequence file without its format suffixes; None for other files."""
    stem = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    if path.name.startswith(".") or stem.suffix.lower() not in SUFFIXES:
        return None
    return stem.stem


def results_name(path: Path, sha256: str) -> str:
    """Name of the results folder: the sample for people, the hash for the next nightly run."""
    return f"{(sample_name(path) or path.name)[:_MAX_STEM]}-{sha256[:12]}"


def iter_inbox(inbox: str) -> Iterator[FileSnapshot]:
    """Yields the sequence files of a folder (not recursive) or glob; skips hidden, other and rejected files, and folders.

    Links are given as links, and never followed: whoever may write to an inbox could name any file of this host.

    Raises:
        UsageError: there is no such folder.
    """
    root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(inbox).parts))
    if Path(inbox).is_dir():
        root = Path(inbox)
        paths = list(root.iterdir())
    elif glob.has_magic(inbox):
        found = map(Path, glob.glob(inbox, recursive=True))
        paths = [path for path in found if path.parent.name != REJECTED]
    else:
        raise UsageError(f"inbox {inbox} is not a folder: make it, or give a glob such as '/data/*.fa.gz'.")
    for path in sorted(set(paths)):
        if sample_name(path) is not None and (path.is_symlink() or path.is_file()):
            with suppress(FileNotFoundError):  # removed since it was listed
                yield FileSnapshot.of(path, root)


def quarantine_file(path: Path, sha256: str, reason: str) -> Path:
    """Moves a file to `rejected` beside it, with its reason in NAME.reason.txt; returns its new path.

    A file of the same name there is kept.

    Raises:
        FileNotFoundError: the file is not there any more, as when another nightly run has moved it.
        OSError: it cannot be moved.
    """
    folder = path.parent / REJECTED
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(folder))
    target = folder / path.name
    if target.exists():
        target = folder / f"{sha256[:12]}-{path.name}"
    # The reason first, so that a moved file has one whenever the process stops.
    note = target.with_name(f"{target.name}.reason.txt")
    write_text(note, f"{reason}\n", shared=True)
    try:
        return path.replace(target)
    except FileNotFoundError:
        if not target.exists():
            note.unlink(missing_ok=True)
        raise


class DigestCache:
    """SHA-256 digests of files, so that nightly runs read each file once; saved at the end of the block.

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
        self._save(self._used)  # drops digests of deleted files

    def sha256(self, file: FileSnapshot) -> str:
        """Hex digest of a file; raises InputError if it cannot be read."""
        name = str(file.path)
        entry = self._known.get(name)
        if entry is None or entry[:2] != (file.size, file.mtime_ns):
            entry = (file.size, file.mtime_ns, input_digest(file.path).sha256)
            if file.reason_to_wait(0.0):
                return entry[2]  # being written: the digest matches no snapshot
        self._used[name] = entry
        if time.monotonic() - self._saved_at > 10.0:
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
class NewFile:
    """A file without results: its content, and the folder for them."""

    path: Path
    sha256: str
    results: Path

    @property
    def has_results(self) -> bool:
        """Whether a nightly run has computed it by now."""
        return _read_counts(RunFolder(self.results).report, self.sha256) is not None


class Computed(NamedTuple):
    """How the run over a file ended: its error or None, wall time, page or "", and whether this nightly run began it."""

    error: BaseException | None = None
    seconds: float = 0.0
    link: str = ""
    is_own: bool = True


ComputeFiles = Callable[[Iterator[NewFile]], Iterator[tuple[NewFile, Computed]]]
"""Runs predict over files, which are hashed as it takes them; yields each when its run has ended."""


def make_writable(folder: Path) -> Path:
    """Creates a folder unless it exists; raises UsageError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK_NAME).touch()
    except OSError as error:
        raise UsageError(
            f"out {folder} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    return folder


@contextmanager
def claim_results(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Creates a results folder and claims it among nightly runs; yields False when another one works there.

    With `wait` it waits for that one. A claim ends with its process, even if that is killed.

    Raises:
        UsageError: the folder cannot be written.
    """
    with open_lock(make_writable(folder) / LOCK_NAME) as lock:
        if wait:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield wait or try_lock(lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOutcome:
    """Outcome of one file.

    Attributes:
        status: done now, kept from before, rejected as unusable, skipped as a link, waiting or failed until next time.
        reason: why, unless done.
        results: results folder, if any.
        contigs: contigs in the file; None without results.
        seconds: wall time of its run in this nightly run.
        link: page of its run, or "".
    """

    path: Path
    status: FileStatus
    reason: str = ""
    results: Path | None = None
    contigs: int | None = None
    contigs_virus: int | None = None
    seconds: float = 0.0
    link: str = ""

    @property
    def name(self) -> str:
        """Printable file name, even if not valid UTF-8."""
        return self.path.name.encode(errors="surrogateescape").decode(errors="replace")


class NightlyBatch:
    """The files of one nightly run; results are in folders inside `out`, a file waits `settle_seconds` after a change."""

    def __init__(
        self, out: Path, digests: DigestCache, compute_files: ComputeFiles, settle_seconds: float
    ) -> None:
        self._out = out
        self._digests = digests
        self._compute_files = compute_files
        self._settle_seconds = settle_seconds
        self._results = _results_by_hash(out)
        self._outcomes: dict[Path, FileOutcome] = {}
        self._by_content: dict[str, FileOutcome] = {}  # by SHA-256

    def process(self, files: Sequence[FileSnapshot]) -> list[FileOutcome]:
        """Computes new files; a failure does not stop the others."""
        left = files
        while left:
            copies: list[FileSnapshot] = []
            snapshots = {file.path: file for file in left}
            for new, computed in self._compute_files(self._new_files(left, copies)):
                self._settle(new.sha256, self._computed(snapshots[new.path], new.sha256, computed))
            left = copies  # whose content has an outcome now, unless the first file changed meanwhile
        return [self._outcomes[file.path] for file in files]

    def _new_files(self, files: Iterable[FileSnapshot], copies: list[FileSnapshot]) -> Iterator[NewFile]:
        """Yields the files to compute, once for each content; the others have an outcome or are added to `copies`."""
        begun: set[str] = set()
        for file in files:
            if outcome := self._link(file) or self._waiting(file):
                self._settle("", outcome)
                continue
            try:
                sha256 = self._digests.sha256(file)
            except InputError as error:
                self._settle("", self._unfinished(file, "", error))
                continue
            if sha256 in begun and sha256 not in self._by_content:
                copies.append(file)
            elif outcome := self._without_run(file, sha256):
                self._settle(sha256, outcome)
            else:
                begun.add(sha256)
                results = self._results.setdefault(sha256[:12], self._out / results_name(file.path, sha256))
                yield NewFile(path=file.path, sha256=sha256, results=results)

    def _without_run(self, file: FileSnapshot, sha256: str) -> FileOutcome | None:
        """The outcome of a file that needs no run; None for the others."""
        if first := self._by_content.get(sha256):
            return self._copy(file, sha256, first)
        if outcome := self._waiting(file) or self._finished(file, sha256, "kept"):
            return outcome
        path = str(file.path)
        if path.encode(errors="replace").decode() != path:  # then it can be no parameter of a flow
            return self._reject(file, sha256, "Its path is not valid UTF-8. Rename it.")
        return None

    def _settle(self, sha256: str, outcome: FileOutcome) -> None:
        _log.info("%s: %s %s", outcome.name, outcome.status, outcome.reason)
        self._outcomes[outcome.path] = outcome
        if sha256 and outcome.status != "waiting":
            self._by_content.setdefault(sha256, outcome)

    def _copy(self, file: FileSnapshot, sha256: str, first: FileOutcome) -> FileOutcome:
        if first.status == "rejected":
            return self._reject(file, sha256, first.reason)
        return replace(
            first,
            path=file.path,
            status="kept" if first.status == "done" else first.status,
            reason=". ".join(filter(None, (f"The same bytes as {first.name}", first.reason))),
            seconds=0.0,
        )

    def _link(self, file: FileSnapshot) -> FileOutcome | None:
        reason = f"{file.link} is a link"
        return FileOutcome(path=file.path, status="skipped", reason=reason) if file.link else None

    def _waiting(self, file: FileSnapshot) -> FileOutcome | None:
        reason = file.reason_to_wait(self._settle_seconds)
        return None if reason is None else FileOutcome(path=file.path, status="waiting", reason=reason)

    def _computed(self, file: FileSnapshot, sha256: str, computed: Computed) -> FileOutcome:
        if computed.error is not None:
            outcome = self._unfinished(file, sha256, computed.error)
        elif computed.is_own:
            outcome = self._finished(file, sha256, "done") or self._changed(file, sha256)
        else:
            self._results |= _results_by_hash(self._out)  # the other one may have named the folder by a copy
            found = self._finished(file, sha256, "kept")
            outcome = replace(found, reason=BY_ANOTHER) if found else self._changed(file, sha256)
        return replace(outcome, seconds=computed.seconds if computed.is_own else 0.0, link=computed.link)

    def _changed(self, file: FileSnapshot, sha256: str) -> FileOutcome:
        reason = f"its bytes are not those in {self._results[sha256[:12]]}: it changed while it was read"
        return FileOutcome(path=file.path, status="waiting", reason=reason)

    def _finished(self, file: FileSnapshot, sha256: str, status: FileStatus) -> FileOutcome | None:
        """Existing results for these bytes, under any name."""
        results = self._results.get(sha256[:12])
        counts = None if results is None else _read_counts(RunFolder(results).report, sha256)
        if counts is None:
            return None
        contigs, virus = counts
        return FileOutcome(
            path=file.path, status=status, results=results, contigs=contigs, contigs_virus=virus
        )

    def _unfinished(self, file: FileSnapshot, sha256: str, error: BaseException) -> FileOutcome:
        """Rejects bad files only: one that is still being written, or on an unreadable disk, is kept for next time."""
        if waiting := self._waiting(file):
            return waiting
        if isinstance(error, InputError) and not isinstance(error, UnreadableInputError):
            return self._reject(file, sha256, str(error))
        reason = f"{type(error).__name__}: {error}"
        results = self._results.get(sha256[:12])
        return FileOutcome(path=file.path, status="failed", reason=reason, results=results)

    def _reject(self, file: FileSnapshot, sha256: str, reason: str) -> FileOutcome:
        try:
            target = quarantine_file(file.path, sha256, reason)
        except FileNotFoundError:
            return FileOutcome(path=file.path, status="waiting", reason="it is not there any more")
        except OSError as error:
            reason = f"{reason} It cannot be moved aside: {error}"
            return FileOutcome(path=file.path, status="failed", reason=reason)
        _log.warning("%s", visible(f"{file.path} was moved to {target}: {reason}"))
        return FileOutcome(path=file.path, status="rejected", reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyReport:
    """A nightly run over `inbox`, with one outcome per file; `out` holds the results folders."""

    inbox: str
    out: Path
    outcomes: Sequence[FileOutcome]

    @property
    def counts(self) -> dict[FileStatus, int]:
        """Files by status."""
        found = Counter(outcome.status for outcome in self.outcomes)
        return {status: found[status] for status in STATUSES}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the nightly run; contigs are those of its own runs."""
        done = self._with_status("done")
        return {
            **{f"files_{status}": count for status, count in self.counts.items()},
            "contigs": sum(outcome.contigs or 0 for outcome in done),
            "contigs_virus": sum(outcome.contigs_virus or 0 for outcome in done),
            "run_seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
        }

    @property
    def summary(self) -> str:
        """The nightly run in one line."""
        counts = [f"{count} {status}" for status, count in reversed(self.counts.items()) if count]
        others = sum(outcome.reason == BY_ANOTHER for outcome in self.outcomes)
        shared = f"; another nightly run computed {others} of them" if others else ""
        return (
            f"{len(self.outcomes)} files: {', '.join(counts)}{shared}" if counts else "no files in the inbox"
        )

    @property
    def failures(self) -> str:
        """The first failures as text."""
        failed = self._with_status("failed")
        shown = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed[:MAX_NAMED])
        more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        return f"Failed: {shown}{more}." if failed else ""

    @property
    def rows(self) -> list[dict[str, str | int | float]]:
        """One row per file."""
        return [
            {
                "file": outcome.name,
                "status": outcome.status,
                "contigs": "" if outcome.contigs is None else outcome.contigs,
                "virus": "" if outcome.contigs_virus is None else outcome.contigs_virus,
                "seconds": round(outcome.seconds, 1),
                "why": outcome.reason,
                "results": str(outcome.results or ""),
                "run": outcome.link,
            }
            for outcome in self._with_status(*STATUSES)
        ]

    @property
    def markdown(self) -> str:
        """The page of the nightly run."""
        metrics = self.metrics
        lines = [
            f"# {self.summary}",
            "",
            f"- inbox: {code(self.inbox)}",
            f"- results: {code(self.out)}",
            f"- {metrics['contigs']:,} contigs called, {metrics['contigs_virus']:,} of them virus, "
            f"in {metrics['run_seconds']:.0f} s of runs",
        ]
        if done := self._with_status("done"):
            rows = (
                (
                    cell(outcome.name),
                    f"{outcome.contigs or 0:,}",
                    f"{outcome.contigs_virus or 0:,}",
                    f"{outcome.seconds:.1f}",
                    f"[run]({outcome.link})" if outcome.link else code(outcome.results),
                )
                for outcome in done[:MAX_ROWS]
            )
            lines += ["", *table(("file", "contigs", "virus", "seconds", "run"), rows)]
        if others := self._with_status("failed", "rejected", "skipped", "waiting"):
            lines += ["", "Not done:", ""]
            lines += [f"- {o.status} {code(o.name)}: {cell(o.reason)}" for o in others[:MAX_ROWS]]
        return "\n".join(lines) + "\n"

    def _with_status(self, *statuses: FileStatus) -> list[FileOutcome]:
        return [outcome for status in statuses for outcome in self.outcomes if outcome.status == status]


def publish_nightly(report: NightlyReport) -> None:
    """Shows the report on the run's page in Prefect."""
    rows = report.rows
    left_out = f", of which the first {MAX_ROWS} are shown" if len(rows) > MAX_ROWS else ""
    show_markdown("virnuc-night", report.markdown, report.summary)
    if rows:
        show_table("virnuc-night-files", rows[:MAX_ROWS], f"{report.summary}{left_out}")


def _results_by_hash(out: Path) -> dict[str, Path]:
    """Results folders by the hash in their names; a finished one wins over others of the same hash."""
    found: dict[str, Path] = {}
    for folder in sorted(out.iterdir()):
        match = _RESULTS_NAME.fullmatch(folder.name)
        if match and (match[1] not in found or RunFolder(folder).report.exists()):
            found[match[1]] = folder
    return found


def _read_counts(report: Path, sha256: str) -> tuple[int, int] | None:
    """Contigs and viral contigs of a finished run over exactly these bytes; None without one."""
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
