"""The journal of a lane in a pool, in JSON Lines: its events, for the run on another machine.

A journal is not state: readers skip invalid lines, and a lane continues when its journal cannot be written.
"""

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self

from virnuc_core import errors
from virnuc_core.errors import VirnucError, is_retryable
from virnuc_core.files import from_json, parse_object
from virnuc_core.inference.events import (
    GpuSample,
    LaneEvent,
    LaneFailed,
    LaneFinished,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
)

_EVENTS: Final = {
    kind.__name__: kind
    for kind in (LaneStarted, ModelsLoaded, ShardDone, GpuSample, LaneFailed, LaneFinished)
}

_log = logging.getLogger(__name__)


class LaneJournal:
    """Thread-safe journal writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        self._path.parent.mkdir(exist_ok=True)
        # Unbuffered, so that lines of two processes do not interleave.
        self._file = self._path.open("ab", buffering=0)
        if self._file.tell():  # an earlier writer may have been killed mid-line
            self._file.write(b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def recording_failure(self, lane: int) -> Iterator[None]:
        """Records an exception of the block, so that readers of the journal can raise it again."""
        try:
            yield
        except (VirnucError, OSError, MemoryError) as error:
            name, message = type(error).__name__, str(error)
            self.write(LaneFailed(lane=lane, error=name, message=message, retryable=is_retryable(error)))
            raise

    def write(self, event: LaneEvent) -> None:
        """Appends an event, and syncs it so that other machines can read it."""
        values = {"event": type(event).__name__, **asdict(event)}
        try:
            with self._turn:
                self._file.write(json.dumps(values).encode() + b"\n")
                os.fsync(self._file.fileno())
        except OSError as error:
            _log.warning("journal %s cannot be written: %s", self._path, error)


class JournalTail:
    """Reads a journal while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[LaneEvent]:
        """Events added since the last call; none while the file does not exist."""
        return [event for line in self._read_whole_lines() if (event := _event_from_line(line)) is not None]

    def _read_whole_lines(self) -> list[bytes]:
        try:
            # Reopened each time: network file systems revalidate their cache only on open.
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines, newline, _ = file.read().rpartition(b"\n")
        except OSError as error:
            _log.debug("journal %s cannot be read: %s", self._path, error)
            return []
        self._offset += len(lines) + len(newline)
        return [line for line in lines.split(b"\n") if line]


def error_of(failure: LaneFailed) -> tuple[type[VirnucError], str]:
    """Class and text of a lane's error; the base class for one that is not of virnuc."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, VirnucError):
        return kind, failure.message
    return VirnucError, f"{failure.error}: {failure.message}"


def _event_from_line(line: bytes) -> LaneEvent | None:
    try:
        values = parse_object(line)
        return from_json(_EVENTS[values.pop("event")], values)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        _log.debug("skipping a line of a journal (%r): %r", error, line[:200])
        return None
