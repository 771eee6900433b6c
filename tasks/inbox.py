"""The inbox of a night: its files, told apart by content and not by name, what became of each, and the report."""

import errno
import glob
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from tasks.artifacts import show_table
from tasks.pages.markdown import code
from virnuc_core.errors import InputError, UnreadableInputError, UsageError
from virnuc_core.files import file_digest, parse_object, write_text
from virnuc_core.models.catalogue import head_of, resolve_head
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest
from virnuc_core.settings import RunConfig

FileStatus = Literal["failed", "rejected", "skipped", "waiting", "done", "kept"]
STATUSES: Final[tuple[FileStatus, ...]] = get_args(FileStatus)  # most urgent first

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSnapshot:
    """A file at one moment: size in bytes, and modification time in nanoseconds since 1970.

    `link` is the symbolic link that the file is, or that a folder above it in the inbox is; it is not followed.
    """

    path: Path
    size: int
    mtime_ns: int
    link: Path | None = None

    @classmethod
    def of(cls, path: Path, root: Path | None = None) -> Self:
        """The file as it is now, in the inbox `root`."""
        found = path.lstat()
        below = [path, *(folder for folder in path.parents if root and root in folder.parents)]
        link = next((each for each in below if each.is_symlink()), None)
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, link=link)

    def reason_to_wait(self, settle_seconds: float) -> str:
        """Why the file may still be incomplete; "" when it has not changed for `settle_seconds`."""
        try:
            if FileSnapshot.of(self.path) != self:
                return "the file changed during this run"
        except FileNotFoundError:
            return "the file was removed"
        age = time.time() - self.mtime_ns / 1e9
        if settle_seconds > max(age, 0.0):
            return (
                f"modified {age:.0f} s ago"
                if age >= 0
                else "its modification time is in the future: touch it"
            )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewFile:
    """A content without results: a file that has it, others with the same bytes, and the folder for the results."""

    file: FileSnapshot
    sha256: str
    results: Path
    copies: list[FileSnapshot] = field(default_factory=list)


class Computed(NamedTuple):
    """How the run over a file ended: its error or None, and its page or ""."""

    new: NewFile
    error: BaseException | None
    run: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOutcome:
    """What became of one file: a row of the night's table.

    Attributes:
        status: done now, kept from before, rejected as unusable, skipped as a link, waiting or failed until next time.
        why: unless done.
        contigs: None without results, as `virus`, which counts the viral ones.
        seconds: wall time of the computation.
        results: results folder.
        run: page of the run.
    """

    path: Path
    status: FileStatus
    why: str = ""
    contigs: int | None = None
    virus: int | None = None
    seconds: float = 0.0
    results: str = ""
    run: str = ""

    @property
    def name(self) -> str:
        """Printable file name, even if not valid UTF-8."""
        return self.path.name.encode(errors="surrogateescape").decode(errors="replace")


def sample_name(path: Path) -> str | None:
    """The name of a sequence file without its format suffixes; None for other files."""
    is_compressed = path.suffix.lower() in (".gz", ".bgz", ".zst", ".xz", ".bz2")
    stem = Path(path.stem) if is_compressed else path
    # An inbox holds other files too; the reader itself goes by content.
    suffixes = (".fa", ".fasta", ".fas", ".fna", ".ffn", ".fsa", ".fq", ".fastq")
    return stem.stem if stem.suffix.lower() in suffixes and not path.name.startswith(".") else None


def settings_digest(config: RunConfig) -> str:
    """Digest of what decides about results: settings but those of place and speed, head, size and time of own weights."""
    settings = config.model_dump_json(exclude={"devices", "token_budget", "shard_seconds", "head"})
    given = [Path(name) for name in (config.esm_model, config.dnabert_model) if name]
    own = [path for model in given if model.is_absolute() for path in (model, *sorted(model.rglob("*")))]
    weights = [path.stat() for path in own if path.is_file()]
    stamps = [(found.st_size, found.st_mtime_ns) for found in weights]
    text = f"{settings} {file_digest(resolve_head(head_of(config)))} {stamps}"
    return hashlib.sha256(text.encode()).hexdigest()


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
        paths = [path for path in found if path.parent.name != "rejected"]
    else:
        raise UsageError(f"inbox {inbox} is not a folder: create it or give a glob such as '/data/*.fa.gz'.")
    for path in sorted(set(paths)):
        if sample_name(path) is not None and (path.is_symlink() or path.is_file()):
            with suppress(FileNotFoundError):  # removed since it was listed
                yield FileSnapshot.of(path, root)


class DigestCache:
    """SHA-256 digests of files, so that nights read each file once. The JSON file `path` may be deleted at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self._used: dict[str, str] = {}
        try:
            self._known = parse_object(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be read (%r): all files are hashed again", path, error)

    def sha256(self, file: FileSnapshot) -> str:
        """Hex digest of a file; raises InputError if it cannot be read."""
        key = f"{file.size} {file.mtime_ns} {file.path}"
        digest = str(self._known.get(key) or input_digest(file.path).sha256)
        if not file.reason_to_wait(0.0):  # else it is being written, and the digest matches no snapshot
            self._used[key] = digest
        return digest

    def save(self) -> None:
        """Writes the digests that were used: not those of files that are gone."""
        try:
            write_text(self._path, json.dumps(self._used, indent=0))
        except OSError as error:
            _log.warning("%s cannot be written (%s): files are hashed again next time", self._path, error)


class Night:
    """One night over an inbox: results are in folders NAME-HASH inside `out`, HASH of the content and the settings."""

    def __init__(self, inbox: str, out: Path, settings: str, settle_seconds: float) -> None:
        self.outcomes: dict[Path, FileOutcome] = {}
        self._inbox, self._out, self._settings = inbox, out, settings
        self._settle_seconds = settle_seconds

    def scan(self) -> list[NewFile]:
        """Finds and hashes the files; returns the contents to compute, the oldest first. The others have an outcome."""
        new: dict[str, NewFile] = {}
        folders = _results_by_hash(self._out)
        digests = DigestCache(self._out / ".virnuc-digests.json")
        for file in sorted(iter_inbox(self._inbox), key=lambda file: file.mtime_ns):
            if file.link is not None:
                self._add(file, "skipped", f"{file.link} is a symbolic link")
            elif not self._is_waiting(file):
                try:
                    sha256 = digests.sha256(file)
                except InputError as error:
                    self._fail(file, "", error)
                    continue
                key = hashlib.sha256(f"{sha256} {self._settings}".encode()).hexdigest()[:12]
                # This many characters of four bytes, a dash and the hash still fit in the 255 bytes of a file name.
                name = f"{(sample_name(file.path) or file.path.name)[:60]}-{key}"
                wanted = NewFile(file=file, sha256=sha256, results=folders.get(key, self._out / name))
                path = str(file.path)
                if self._is_waiting(file) or self._has_results(wanted, "kept"):
                    continue
                if path.encode(errors="replace").decode() != path:  # then it can be no parameter of a flow
                    self._reject(file, sha256, "The path is not valid UTF-8. Rename the file.")
                elif new.setdefault(key, wanted) is not wanted:
                    new[key].copies.append(file)
        digests.save()
        return list(new.values())

    def settle(self, computed: Computed) -> None:
        """Records what became of a file and its copies once its run has ended."""
        new, error, run = computed
        if error is not None:
            self._fail(new.file, new.sha256, error)
        elif not self._has_results(new, "done"):
            self._add(
                new.file,
                "waiting",
                f"the file changed while it was read: {new.results} belongs to other content",
            )
        first = self.outcomes[new.file.path] = replace(self.outcomes[new.file.path], run=run)
        why = ". ".join(filter(None, (f"Same content as {first.name}", first.why)))
        for copy in new.copies:
            if first.status == "rejected":
                self._reject(copy, new.sha256, first.why)
            elif not self._has_results(replace(new, file=copy), "kept", why):
                self._add(copy, first.status, why)

    def _add(self, file: FileSnapshot, status: FileStatus, why: str, **results: Any) -> None:
        _log.info("%s: %s %s", visible(str(file.path)), status, why)
        self.outcomes[file.path] = FileOutcome(path=file.path, status=status, why=why, **results)

    def _has_results(self, new: NewFile, status: FileStatus, why: str = "") -> bool:
        """Records a file whose folder has a finished run over exactly its bytes."""
        report = RunFolder(new.results).report
        try:
            document = parse_object(report.read_bytes())
            if [file["sha256"] for file in document["inputs"]] != [new.sha256]:
                return False
            counts, seconds = document["counts"], round(sum(document["stage_seconds"].values()), 1)
            amounts = {"contigs": counts["records"], "virus": counts["contigs_virus"], "seconds": seconds}
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not a run.json of virnuc (%r): the file is computed again", report, error)
            return False
        self._add(new.file, status, why, results=str(new.results), **amounts)
        return True

    def _is_waiting(self, file: FileSnapshot) -> bool:
        if why := file.reason_to_wait(self._settle_seconds):
            self._add(file, "waiting", why)
        return bool(why)

    def _fail(self, file: FileSnapshot, sha256: str, error: BaseException) -> None:
        """Rejects bad files only: one that is being written, or on a disk that cannot be read, is kept for the next night."""
        if isinstance(error, InputError) and not isinstance(error, UnreadableInputError):
            self._reject(file, sha256, str(error))
        elif not self._is_waiting(file):
            self._add(file, "failed", f"{type(error).__name__}: {error}")

    def _reject(self, file: FileSnapshot, sha256: str, why: str) -> None:
        if self._is_waiting(file):
            return
        try:
            quarantine_file(file.path, sha256, why)
        except OSError as error:
            self._add(file, "failed", f"{why} The file cannot be moved to rejected: {error}")
        else:
            self._add(file, "rejected", why)


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyReport:
    """A night over `inbox`, with one outcome per file; `out` holds the results folders."""

    inbox: str
    out: Path
    outcomes: Sequence[FileOutcome]

    @property
    def metrics(self) -> dict[str, int]:
        """Files by status; contigs and seconds of what was computed."""
        found, done = Counter(outcome.status for outcome in self.outcomes), self._with_status("done")
        return {
            **{f"files_{status}": found[status] for status in STATUSES},
            "contigs": sum(outcome.contigs or 0 for outcome in done),
            "contigs_virus": sum(outcome.virus or 0 for outcome in done),
            "run_seconds": round(sum(outcome.seconds for outcome in done)),
        }

    @property
    def summary(self) -> str:
        counts = [(self.metrics[f"files_{status}"], status) for status in reversed(STATUSES)]
        shown = ", ".join(f"{count} {status}" for count, status in counts if count)
        return f"{len(self.outcomes)} files: {shown}" if shown else "no files in the inbox"

    @property
    def failures(self) -> str:
        failed = [f"{outcome.name}: {outcome.why}" for outcome in self._with_status("failed")]
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        return f"Failed: {'; '.join(failed[:3])}{more}." if failed else ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per file, the most urgent first."""
        return [
            {"file": outcome.name}
            | {
                name: "" if value is None else value
                for name, value in asdict(outcome).items()
                if name != "path"
            }
            for outcome in self._with_status(*STATUSES)
        ]

    def publish(self) -> None:
        """Shows a table of the files on the run's page in Prefect."""
        amounts = "{contigs:,} sequences classified, {contigs_virus:,} viral; run time {run_seconds:,} s"
        lines = [f"# {self.summary}", "", f"- inbox: {code(self.inbox)}", f"- results: {code(self.out)}"]
        lines.append(f"- {amounts.format(**self.metrics)}")
        if len(self.outcomes) > 1000:
            lines.append("- first 1,000 files shown")
        show_table("virnuc-night", self.rows[:1000], "\n".join(lines))

    def _with_status(self, *statuses: FileStatus) -> list[FileOutcome]:
        return [outcome for status in statuses for outcome in self.outcomes if outcome.status == status]


def quarantine_file(path: Path, sha256: str, reason: str) -> None:
    """Moves a file to `rejected` beside it, with its reason in NAME.reason.txt; a file of the same name there is kept.

    Raises:
        OSError: it cannot be moved.
    """
    folder = path.parent / "rejected"
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link", str(folder))
    target = folder / path.name
    if target.exists():
        target = folder / f"{sha256[:12]}-{path.name}"
    # The reason first, so that a moved file has one whenever the process stops.
    write_text(target.with_name(f"{target.name}.reason.txt"), f"{reason}\n", shared=True)
    path.replace(target)


def _results_by_hash(out: Path) -> dict[str, Path]:
    """Results folders by the hash in their names; a finished one wins over others of the same hash."""
    found: dict[str, Path] = {}
    for folder in sorted(out.iterdir()):
        match = re.fullmatch(r".+-([0-9a-f]{12})", folder.name)
        if match and (match[1] not in found or RunFolder(folder).report.exists()):
            found[match[1]] = folder
    return found
