"""One night: each file of an inbox is told apart by its bytes, computed once, and never in the way of another."""

import fcntl
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tasks.inbox import DigestCache, Look, results_name, set_aside
from tasks.night_report import Outcome, Status
from virnuc_core.errors import InputError, UsageError
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder

LOCK_NAME: Final = ".virnuc-nightly.lock"
DIGESTS_NAME: Final = ".virnuc-digests.json"

_RESULTS_NAME: Final = re.compile(r".+-([0-9a-f]{12})")

_log = logging.getLogger(__name__)


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
