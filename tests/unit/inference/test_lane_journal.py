"""Journals: readable by others while they are written, and after their writer was killed."""

import errno
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.made_hostile import hostile_json
from tests.made_lanes import done, finished, loaded, sample, started
from virnuc_core.errors import CheckpointError, LaneError, VirnucError
from virnuc_core.inference.events import LaneEvent, LaneFailed
from virnuc_core.inference.lane_journal import (
    JournalTail,
    LaneJournal,
    error_of,
)

EVERY_EVENT: tuple[LaneEvent, ...] = (
    started(),
    loaded(),
    done(0),
    sample(0.5, 8),
    LaneFailed(lane=2, error="LaneError", message='said "no"\nand died', retryable=True),
    finished(),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lanes" / "lane-0002-0123abcd.jsonl"


def test_every_event_is_read_as_it_was_written(path: Path) -> None:
    tail = JournalTail(path)
    assert tail.read_new() == []
    with LaneJournal(path) as journal:
        for count, event in enumerate(EVERY_EVENT, start=1):
            journal.write(event)
            [read] = tail.read_new()
            assert (read, read.time) == (event, event.time)
            assert tail.read_new() == []
            assert len(path.read_text().splitlines()) == count


def test_an_unfinished_line_waits_until_it_is_complete(path: Path) -> None:
    with LaneJournal(path) as journal:
        journal.write(started())
        journal.write(loaded())
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    tail = JournalTail(path)
    assert tail.read_new() == [started()]
    path.write_bytes(content)
    assert tail.read_new() == [loaded()]


def test_lines_that_make_no_sense_are_passed_over(path: Path) -> None:
    """Such as those of a killed writer."""
    finished = {"time": 1.0, "event": "LaneFinished", "lane": 0}
    odd: list[dict[str, Any]] = [
        finished | {"time": 10**400},
        finished | {"lane": "0"},
        finished | {"time": float("nan")},
        finished | {"event": ["LaneFinished"]},
        finished | {"event": "Unheard"},
        {"event": "LaneStarted", **asdict(started()), "shards": ["0"]},
        {"time": 1.0, "event": "ShardDone", "lane": 0, "shard": 0, "counters": [], "seconds": {}},
    ]
    with LaneJournal(path) as journal:
        journal.write(started(host="first"))
    with path.open("ab") as file:
        for content in (*hostile_json("time").values(), *(json.dumps(line).encode() for line in odd)):
            file.write(content.replace(b"\n", b" ") + b"\n")
        file.write(b'{"time": 1, "event": "LaneStar')
    with LaneJournal(path) as journal:
        journal.write(started(host="second"))
    assert JournalTail(path).read_new() == [started(host="first"), started(host="second")]


def test_a_journal_that_cannot_be_written_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LaneJournal(Path("/dev/full")) as journal:
        journal.write(started())
    assert "journal /dev/full cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("error", "retryable", "read"),
    [
        (LaneError("died"), True, LaneError("died")),
        (CheckpointError("no weights"), False, CheckpointError("no weights")),
        (OSError(errno.EIO, "bad"), True, VirnucError("OSError: [Errno 5] bad")),
    ],
)
def test_an_error_is_written_down_and_read_again(
    path: Path, error: Exception, retryable: bool, read: VirnucError
) -> None:
    with pytest.raises(type(error)), LaneJournal(path) as journal, journal.recording_failure(lane=2):
        raise error
    [event] = JournalTail(path).read_new()
    failure = LaneFailed(lane=2, error=type(error).__name__, message=str(error), retryable=retryable)
    assert event == failure
    assert error_of(failure) == (type(read), str(read))
