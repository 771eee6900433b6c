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
    """Progress of one lane; rows are frames or sequences, in this run only. `seconds_left` is None until it is known."""

    lane: int
    device: str
    rows_done: int
    rows_total: int
    seconds_left: float | None = None

    def __str__(self) -> str:
        done = (
            f"{self.rows_done / max(1, self.rows_total):.0%} ({self.rows_done:,} of {self.rows_total:,} rows)"
        )
        left = f", {_in_words(self.seconds_left)} left" if self.seconds_left else ""
        return f"lane {self.lane} on {self.device}: {done}{left}"


def _in_words(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Progress(Protocol):
    """A display of a run's progress."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def lane(self, progress: LaneProgress) -> None:
        """A lane has started or computed more rows."""


class LoggedProgress:
    """Progress as log lines, for runs without a terminal."""

    def stage(self, name: str) -> None:
        _log.info("stage: %s", name)

    def lane(self, progress: LaneProgress) -> None:
        _log.info("%s", progress)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaneCount:
    """Rows of a lane: as shown, before its process started, and in committed shards; `since` is when it began to compute."""

    shown: LaneProgress
    before: int
    committed: int
    since: float

    def with_rows(self, rows: int, time: float) -> "_LaneCount":
        """Shows more rows; those that were shown as computed before they were committed stay."""
        done = max(rows, self.shown.rows_done)
        new, left = done - self.before, self.shown.rows_total - done
        seconds_left = (time - self.since) / new * left if new else None
        return replace(self, shown=replace(self.shown, rows_done=done, seconds_left=seconds_left))


class LaneRows:
    """An observer of a run's lanes that counts computed rows, and passes progress on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lanes: dict[int, _LaneCount] = {}

    def __call__(self, event: "LaneEvent") -> None:
        before = self._lanes.get(event.lane)
        count = _counted(before, event)
        if count is not None and count is not before:
            self._lanes[event.lane] = count
            if before is None or count.shown is not before.shown:
                self._progress.lane(count.shown)


def _counted(before: _LaneCount | None, event: "LaneEvent") -> _LaneCount | None:
    """The count of a lane after an event; as before if that says nothing of rows."""
    from virnuc_core.inference.events import LaneStarted, ModelsLoaded, RowsComputed, ShardDone

    if isinstance(event, LaneStarted):
        kept = before.committed if before else 0
        device = event.device if event.host == socket.gethostname() else event.place
        shown = LaneProgress(lane=event.lane, device=device, rows_done=kept, rows_total=kept + event.rows)
        return _LaneCount(shown=shown, before=kept, committed=kept, since=event.time)
    if before is None:
        return None
    if isinstance(event, ModelsLoaded):
        return replace(before, since=event.time)
    if isinstance(event, ShardDone):
        committed = before.committed + event.rows
        return replace(before, committed=committed).with_rows(committed, event.time)
    if isinstance(event, RowsComputed):
        return before.with_rows(before.before + event.rows, event.time)
    return before


# A context variable, since Prefect records every parameter of a flow.
_progress: ContextVar[Progress] = ContextVar("progress", default=LoggedProgress())  # noqa: B039 (immutable)


def current_progress() -> Progress:
    return _progress.get()


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Shows the progress of runs inside the block with `progress`."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)
