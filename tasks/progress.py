"""Who is told how far a run is: a terminal, or by default the log."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from virnuc_core.inference.events import LaneStarted, ShardDone
from virnuc_core.inference.lane_journal import JournalEntry
from virnuc_core.inference.plan import RunPlan
from virnuc_core.results.stage_clock import StageClock

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneProgress:
    """How far one lane is.

    Attributes:
        lane: number of the lane, from 0.
        device: where it computes.
        rows_done: rows (frames or sequences) finished in this run.
        rows_total: rows this lane has to do in this run.
    """

    lane: int
    device: str
    rows_done: int
    rows_total: int


class Progress(Protocol):
    """Something that shows how far a run is."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def lane(self, progress: LaneProgress) -> None:
        """A lane has begun, or has finished a shard."""


class LoggedProgress:
    """Progress as log lines, for runs that nobody watches from a terminal."""

    def stage(self, name: str) -> None:
        """Logs the name."""
        _log.info("stage: %s", name)

    def lane(self, progress: LaneProgress) -> None:
        """Logs the count."""
        _log.info(
            "lane %d on %s: %d of %d rows",
            progress.lane,
            progress.device,
            progress.rows_done,
            progress.rows_total,
        )


# A context variable and not a parameter: the parameters of a flow are recorded, and this is not one of them.
_current: ContextVar[Progress] = ContextVar("progress", default=LoggedProgress())  # noqa: B039 (immutable)


def current_progress() -> Progress:
    """Whom to tell."""
    return _current.get()


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Tells `progress` about the runs inside the block."""
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)


class LaneRows:
    """Makes progress of what lanes write in their journals.

    Args:
        plan: says how many rows a shard has.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._rows = [shard.end - shard.begin for shard in plan.shards]
        self._progress = current_progress()
        self._lanes: dict[int, LaneProgress] = {}
        self._changed: set[int] = set()

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Takes in that a lane has begun, or has finished a shard."""
        event = entry.event
        before = self._lanes.get(event.lane)
        if isinstance(event, LaneStarted):
            done = before.rows_done if before else 0
            left = sum(self._rows[shard] for shard in event.shards)
            where = event.device if event.host == socket.gethostname() else f"{event.host} {event.device}"
            progress = LaneProgress(lane=event.lane, device=where, rows_done=done, rows_total=done + left)
        elif isinstance(event, ShardDone) and before:
            progress = replace(before, rows_done=before.rows_done + self._rows[event.shard])
        else:
            return
        self._lanes[event.lane] = progress
        self._changed.add(event.lane)

    def end_poll(self) -> None:
        """Tells how far the lanes are about which there was news."""
        for lane in sorted(self._changed):
            self._progress.lane(self._lanes[lane])
        self._changed.clear()


def stage_clock() -> StageClock:
    """A clock that tells whoever is told how far the run is."""
    return StageClock(lambda name: current_progress().stage(name))
