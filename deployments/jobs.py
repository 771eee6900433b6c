"""What `virnuc server worker` keeps of each job on its disk: whether its process is alive, and how it ended."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import httpx

from deployments.fitness import is_locked
from deployments.server import crash_run
from virnuc_core import errors
from virnuc_core.errors import HostError, LaneError, VirnucError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A flow run in a slot; its files are in the folder of its worker."""

    folder: Path
    run_id: UUID

    @property
    def lock(self) -> Path:
        """Held by the process of the job until it ends."""
        return self.folder / f"{self.run_id}.lock"

    @property
    def outcome(self) -> Path:
        """Written by lanes and plans when they end."""
        return self.folder / f"{self.run_id}.json"

    def begin(self) -> None:
        """Leaves a record for the case that the worker is killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock.touch()

    def end(self) -> None:
        """Removes the files."""
        self.lock.unlink(missing_ok=True)
        self.outcome.unlink(missing_ok=True)

    def find_error(self, status_code: int) -> VirnucError | None:
        """What ended the job, from its outcome or else the exit code of its process; None for success."""
        try:
            found = json.loads(self.outcome.read_bytes())
        except FileNotFoundError:
            if status_code == 0:  # a whole run, or a job that was cancelled before it began
                return None
            if status_code < 0 or status_code > 128:
                return LaneError(f"its process was killed (exit code {status_code}).")
            return HostError(f"its process could not start (exit code {status_code}): see its log.")
        if found["error"] is None:
            return None
        kind = getattr(errors, found["error"], VirnucError)
        error: VirnucError = kind(f"{found['error']}: {found['message']}")
        return error


def crash_orphaned_jobs(folder: Path) -> None:
    """Tells the server which jobs of a stopped worker have ended with it; those that are alive are left alone.

    A stopped worker kills its jobs without telling the server, which would notice the missing heartbeat only minutes
    later. Only jobs that the worker of this folder has started count, so those of a namesake are safe.
    """
    message = f"Worker {folder.name} ended, and the process of this run with it."
    try:
        for lock in folder.glob("*.lock"):
            if not is_locked(lock):
                job = Job(folder, UUID(lock.stem))
                crash_run(job.run_id, message)
                job.end()
    except httpx.HTTPError as error:
        _log.warning("%s: the server cannot be told which runs have ended with it (%r)", folder.name, error)
