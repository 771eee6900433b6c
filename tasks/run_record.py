"""What is to be recorded of a run and its parts, until MLflow has taken it.

An entry goes straight to MLflow, in a thread beside the run. While it cannot be written, entries wait in files in the
run's folder, from which they are written later, exactly once: by the same run, by the next run of the same folder or VIRNUC_HOME, or by `virnuc track`.
A record whose process was killed is found by its lock, and its runs are ended.
"""

import fcntl
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Final

from tasks.mlflow_process import store_of
from tasks.mlflow_store import Entry, RecordStore, first_line, is_refused, store_name
from virnuc_core.env_config import home_folder
from virnuc_core.errors import StorageLostError
from virnuc_core.files import parse_object
from virnuc_core.run_folder import RunFolder

SECONDS_BETWEEN_TRIALS: Final = 60.0
_SECONDS_FOR_EARLIER_RUNS: Final = 20.0
_SECONDS_BETWEEN_POLLS: Final = 5.0  # of lanes, which wait while something is written
# They are kept apart: a store of artifacts may be away, or lack a package here, while metrics can be written.
_ARTIFACTS: Final = frozenset({"figure", "files", "text", "model"})

_log = logging.getLogger(__name__)


class RunRecord:
    """A locked folder for the entries of one run and its parts that MLflow has not taken yet."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self.folder = folder
        self.store = store_of(folder.name)
        self.numbers = count()
        self._lock = lock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._metrics = _Outbox(folder / "metrics.jsonl", self.store)
        self._artifacts = _Outbox(folder / "artifacts.jsonl", self.store)

    @classmethod
    def create(cls, run: Path | None) -> "RunRecord":
        """A new record in a run's folder, or in virnuc's home; which also keeps a link to it."""
        key, home = secrets.token_hex(8), home_folder() / "tracking"
        parent = home if run is None else RunFolder(run.absolute()).tracking
        try:
            record = _make_locked(parent / key)
        except OSError as error:
            _log.warning("%s: what MLflow does not take now is lost when this machine is restarted", error)
            record = _make_locked(Path(tempfile.mkdtemp(prefix="virnuc-")) / key)
        if parent != home:
            with suppress(OSError):
                home.mkdir(parents=True, exist_ok=True)
                (home / key).symlink_to(record.folder, target_is_directory=True)
        return record

    @classmethod
    def reopen(cls, folder: Path) -> "RunRecord | None":
        """A record that an earlier run left for the present store; None while its process lives."""
        try:
            lock = (folder / "lock").open("r+")
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == store_name():
                return cls(folder.resolve(), lock)
            _log.info("%s is for another MLflow than %s", folder, store_name())
        except OSError:
            _log.info("%s: its run is at work", folder)
        lock.close()
        return None

    def send(self, entry: Entry) -> None:
        """Writes an entry to MLflow or keeps it, in the record's thread."""
        self.submit(partial(self._write, entry))

    def submit(self, work: Callable[[], None]) -> None:
        """Calls `work` in the record's thread, after what was submitted before."""
        self._thread.submit(work).add_done_callback(_report_failure)

    def wait(self) -> None:
        """Waits until all that was sent is written or kept."""
        if not self._lock.closed:
            self._thread.submit(lambda: None).result()

    def _write(self, entry: Entry) -> None:
        (self._artifacts if entry["do"] in _ARTIFACTS else self._metrics).send(entry)
        with suppress(OSError):
            os.utime(self.folder / "lock")

    def hurry(self, seconds: float) -> None:
        """Lets requests begin for this many seconds more, since this process is about to be killed; then entries are kept."""
        for outbox in (self._metrics, self._artifacts):
            outbox.deadline = min(outbox.deadline, time.monotonic() + seconds)

    def close(self) -> str:
        """Tries once more to write what is kept; removes the record if nothing is left, else returns the reason."""
        self._thread.shutdown()
        failure = self._metrics.drain() or self._artifacts.drain()
        if not failure:
            self._remove()
        self._lock.close()
        return failure

    def complete(self, seconds: float = math.inf) -> str:
        """Writes what an earlier run left, ends its runs, and closes; gives up after some time, and returns the reason."""
        last_sign = (self.folder / "lock").stat().st_mtime
        self.hurry(seconds)
        if failure := self._metrics.drain(search=True):
            self._lock.close()
            return failure
        for number in sorted(self.store.open_runs):
            self.send({"run": number, "do": "end", "status": "KILLED", "time": last_sign})
        return self.close()

    def complete_earlier(self) -> None:
        """Completes other records of the same run folder and of virnuc's home, for a while; what is left waits."""
        if self._metrics.waiting:
            return
        until = time.monotonic() + _SECONDS_FOR_EARLIER_RUNS
        for folder in earlier_records(self.folder.parent, home_folder() / "tracking"):
            if (left := until - time.monotonic()) > 0 and (record := RunRecord.reopen(folder)):
                failure = record.complete(left)
                _log.info("record %s in MLflow: %s", folder, failure or "completed")

    def _remove(self) -> None:
        link = home_folder() / "tracking" / self.folder.name
        if link.is_symlink():
            link.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()  # unless there are others


def _report_failure(work: Future[None]) -> None:
    if error := work.exception():
        _log.error("a part of the record for MLflow is lost: %r", error)


def earlier_records(*parents: Path) -> Iterator[Path]:
    """Folders of records, each once; links whose record is gone are removed."""
    seen = set()
    for parent in parents:
        for path in sorted(parent.glob("[!.]*")):
            if path.is_symlink() and not path.exists():
                path.unlink(missing_ok=True)
            elif path.name not in seen:
                seen.add(path.name)
                yield path


def complete_records(parents: Iterable[Path]) -> tuple[int, int]:
    """Completes the records in these folders; returns their number, and that of those of living runs and other stores.

    Raises:
        StorageLostError: MLflow cannot be written.
    """
    completed = left = 0
    for folder in earlier_records(*parents):
        if (record := RunRecord.reopen(folder)) is None:
            left += 1
        elif failure := record.complete():
            raise StorageLostError(
                f"MLflow cannot be written ({failure}): see to MLFLOW_TRACKING_URI and its server, and run `virnuc track` "
                f"again. What is to be recorded is kept in {folder.resolve()}."
            )
        else:
            completed += 1
    return completed, left


def _make_locked(folder: Path) -> RunRecord:
    """The folder gets its name when it is locked, so that nobody takes it for one that was left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir()
    lock = (hidden / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(store_name())
    lock.flush()
    hidden.rename(folder)
    return RunRecord(folder, lock)


class _Outbox:
    """Sends entries in order; those that the store does not take are kept in a file, with the number of those sent since.

    Attributes:
        waiting: entries that are kept.
        deadline: on the monotonic clock, from when on no request begins.
    """

    def __init__(self, path: Path, store: RecordStore) -> None:
        self._path = path
        self._store = store
        self._next_trial = 0.0
        self._sent = 0
        self.waiting = len(self._read())
        self.deadline = math.inf

    def send(self, entry: Entry) -> None:
        """Writes an entry, after those that wait; while the store is away, it is asked once in a while."""
        failure = "the process was stopped"
        try:
            if self.waiting and self._next_trial <= time.monotonic():
                self.drain(seconds=_SECONDS_BETWEEN_POLLS)
            if not self.waiting and self._next_trial <= time.monotonic():
                failure = self._attempt(partial(self._store.write, entry), entry)
        finally:
            if failure:
                self._append(entry)
                self.waiting += 1

    def drain(self, *, search: bool = False, seconds: float = math.inf) -> str:
        """Writes what is kept, for a while; returns why not all of it was, or ""."""
        until = time.monotonic() + seconds
        if not self.waiting and not search:
            return ""
        if failure := self._attempt(self._store.find_runs):
            return failure
        entries, begin = self._read(), self._sent
        for entry in entries:
            if failure := self._attempt(partial(self._store.write, entry), entry):
                break
            self._sent += 1
            if time.monotonic() >= until:
                break
        if self._sent > begin:
            self._append({"sent": self._sent})
        self.waiting = len(entries) - (self._sent - begin)
        return failure

    def _attempt(self, write: Callable[[], None], entry: Entry | None = None) -> str:
        """Calls `write`; returns why it failed, or "". An entry that MLflow will never take is left out."""
        if time.monotonic() >= self.deadline:
            return "there was no time"
        try:
            write()
        except Exception as error:  # noqa: BLE001 - clients of artifact stores raise what their libraries do
            if entry and entry["do"] != "open" and is_refused(error):
                _log.warning("MLflow refuses a part of the record: %s", first_line(error))
                return ""
            self._next_trial = time.monotonic() + SECONDS_BETWEEN_TRIALS
            reason = first_line(error)
            level = logging.DEBUG if self._store.has_warned else logging.WARNING
            self._store.has_warned = True
            _log.log(
                level,
                "MLflow cannot be written (%s): the results are whole, and what is to be recorded is kept in %s, for "
                "the next run or `virnuc track`",
                reason,
                self._path.parent,
            )
            return reason or type(error).__name__
        return ""

    def _append(self, line: Entry) -> None:
        try:
            with self._path.open("a+b") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    file.write(b"\n")  # an earlier process was killed in the middle of a line
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            _log.warning("%s: a part of the record for MLflow is lost", error)

    def _read(self) -> list[Entry]:
        """The entries that wait."""
        entries: list[Entry] = []
        with suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                with suppress(ValueError):
                    entry = parse_object(line)
                    if "sent" in entry:
                        self._sent = entry["sent"]
                    else:
                        entries.append(entry)
        return entries[self._sent :]
