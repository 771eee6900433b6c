"""Progress of a run, for whoever shows it; quick to import."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

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
