"""Progress of a run, for whoever shows it; quick to import."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tasks.artifacts import ProgressArtifact

if TYPE_CHECKING:  # imports HDF5
    from virnuc_core.inference.events import LaneEvent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneProgress:
    """Progress of one lane; rows are frames or sequences, in this run only."""

    lane: int
    device: str
    rows_done: int
    rows_total: int


class Progress(Protocol):
    """A display of a run's progress."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def lane(self, progress: LaneProgress) -> None:
        """A lane has started or has finished a shard."""


class LoggedProgress:
    """Progress as log lines, for runs without a terminal."""

    def stage(self, name: str) -> None:
        """Logs the stage."""
        _log.info("stage: %s", name)

    def lane(self, progress: LaneProgress) -> None:
        """Logs the row count."""
        _log.info(
            "lane %d on %s: %d of %d rows",
            progress.lane,
            progress.device,
            progress.rows_done,
            progress.rows_total,
        )


class FlowProgress(LoggedProgress):
    """Progress as log lines, and as a bar of each lane on the page of the current flow run."""

    def __init__(self) -> None:
        self._bars: dict[int, ProgressArtifact] = {}
        self._next_lines: dict[int, float] = {}

    def lane(self, progress: LaneProgress) -> None:
        """Updates the lane's bar, and logs at most one line a minute, and the last: the server keeps all of them."""
        now = time.monotonic()
        if now >= self._next_lines.get(progress.lane, 0.0) or progress.rows_done == progress.rows_total:
            self._next_lines[progress.lane] = now + 60.0
            super().lane(progress)
        if progress.lane not in self._bars:
            title = f"Lane {progress.lane} on {progress.device}"
            self._bars[progress.lane] = ProgressArtifact(f"virnuc-lane-{progress.lane}", title)
        self._bars[progress.lane].update(100 * progress.rows_done / max(1, progress.rows_total))


class LaneRows:
    """An observer of a run's lanes that counts the rows of finished shards, and passes progress on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lanes: dict[int, LaneProgress] = {}

    def __call__(self, event: "LaneEvent") -> None:
        """Takes the next event of any lane."""
        from virnuc_core.inference.events import LaneStarted, ShardDone

        before = self._lanes.get(event.lane)
        if isinstance(event, LaneStarted):
            done = before.rows_done if before else 0
            device = event.device if event.host == socket.gethostname() else event.place
            progress = LaneProgress(
                lane=event.lane, device=device, rows_done=done, rows_total=done + event.rows
            )
        elif isinstance(event, ShardDone) and before:
            progress = replace(before, rows_done=before.rows_done + event.rows)
        else:
            return
        self._lanes[event.lane] = progress
        self._progress.lane(progress)


# A context variable, since Prefect records every parameter of a flow.
_progress: ContextVar[Progress] = ContextVar("progress", default=LoggedProgress())  # noqa: B039 (immutable)


def current_progress() -> Progress:
    """The progress display of this context."""
    return _progress.get()


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Shows the progress of runs inside the block with `progress`."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)
