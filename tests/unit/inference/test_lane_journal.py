"""Journals: readable by others while they are written, and after their writer was killed."""

import errno
import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.binary_edits import hostile_json
from virnuc_core.errors import CheckpointError, LaneError, VirnucError
from virnuc_core.inference.events import (
    GpuSample,
    LaneEvent,
    LaneFailed,
    LaneFinished,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
    StageSeconds,
)
from virnuc_core.inference.lane_journal import (
    JournalEntry,
    JournalTail,
    LaneJournal,
    lane_report,
    raise_failure,
)
from virnuc_core.inference.shard import ModelCounters, ShardCounters

MODEL = ModelCounters(name="tiny", family="esm2", sequences=3, tokens=90, batches=1, capacity=100)
COUNTERS = ShardCounters(frames=3, residues=80, bases=240, models=(MODEL,))


def started(pid: int = 7, shards: tuple[int, ...] = (0, 1)) -> LaneStarted:
    return LaneStarted(lane=2, device="cuda:0", host="node1", pid=pid, shards=shards)


def loaded(seconds: float = 2.0) -> ModelsLoaded:
    return ModelsLoaded(lane=2, device="cuda:0", device_name="a GPU", seconds=seconds)


def done(shard: int) -> ShardDone:
    return ShardDone(lane=2, shard=shard, counters=COUNTERS, seconds=StageSeconds(forward=1.5))


EVERY_EVENT: tuple[LaneEvent, ...] = (
    started(),
    loaded(),
    done(0),
    GpuSample(lane=2, utilization=0.5, memory_bytes=1 << 33),
    LaneFailed(lane=2, error="LaneError", message='said "no"\nand died', retryable=True),
    LaneFinished(lane=2, seconds=9.5),
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
            [entry] = tail.read_new()
            assert entry.event == event
            assert tail.read_new() == []
            assert len(path.read_text().splitlines()) == count


def test_an_unfinished_line_waits_until_it_is_complete(path: Path) -> None:
    with LaneJournal(path) as journal:
        journal.write(started())
        journal.write(loaded())
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    tail = JournalTail(path)
    assert [entry.event for entry in tail.read_new()] == [started()]
    path.write_bytes(content)
    assert [entry.event for entry in tail.read_new()] == [loaded()]


def test_lines_that_make_no_sense_are_passed_over(path: Path) -> None:
    """Such as those of a killed writer."""
    finished = {"time": 1.0, "event": "LaneFinished", "lane": 0, "seconds": 1.0}
    odd: list[dict[str, Any]] = [
        finished | {"time": 10**400},
        finished | {"lane": "0"},
        finished | {"seconds": float("nan")},
        finished | {"event": ["LaneFinished"]},
        finished | {"event": "Unheard"},
        {"time": 1.0, "event": "LaneStarted", **asdict(started()), "shards": ["0"]},
        {"time": 1.0, "event": "ShardDone", "lane": 0, "shard": 0, "counters": [], "seconds": {}},
    ]
    with LaneJournal(path) as journal:
        journal.write(started(pid=1))
    with path.open("ab") as file:
        for content in (*hostile_json("time").values(), *(json.dumps(line).encode() for line in odd)):
            file.write(content.replace(b"\n", b" ") + b"\n")
        file.write(b'{"time": 1, "event": "LaneStar')
    with LaneJournal(path) as journal:
        journal.write(started(pid=2))
    assert [entry.event for entry in JournalTail(path).read_new()] == [started(pid=1), started(pid=2)]


def test_what_was_there_can_be_skipped(path: Path) -> None:
    with LaneJournal(path) as journal:
        journal.write(started())
        tail = JournalTail(path)
        tail.skip()
        journal.write(loaded())
    assert [entry.event for entry in tail.read_new()] == [loaded()]


def test_threads_do_not_mix_their_lines(path: Path) -> None:
    with LaneJournal(path) as journal:
        threads = [
            threading.Thread(target=lambda: [journal.write(done(i)) for i in range(20)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(JournalTail(path).read_new()) == 80


def test_a_journal_that_cannot_be_written_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LaneJournal(Path("/dev/full")) as journal:
        journal.write(started())
    assert "journal /dev/full cannot be written" in caplog.text


def test_an_error_is_written_down_and_raised_on(path: Path) -> None:
    for error in (LaneError("died"), CheckpointError("no weights"), OSError(errno.EIO, "bad disk")):
        with (
            pytest.raises(type(error)),
            LaneJournal(path) as journal,
            journal.recording_failure(lane=2),
        ):
            raise error
    failures = [entry.event for entry in JournalTail(path).read_new()]
    assert failures == [
        LaneFailed(lane=2, error="LaneError", message="died", retryable=True),
        LaneFailed(lane=2, error="CheckpointError", message="no weights", retryable=False),
        LaneFailed(lane=2, error="OSError", message=f"[Errno {errno.EIO}] bad disk", retryable=True),
    ]


def test_a_failure_is_raised_as_what_it_was() -> None:
    with pytest.raises(CheckpointError, match=r"^no weights$"):
        raise_failure(LaneFailed(lane=2, error="CheckpointError", message="no weights", retryable=False))
    with pytest.raises(VirnucError, match=r"^lane 2: OSError: bad disk$") as caught:
        raise_failure(LaneFailed(lane=2, error="OSError", message="bad disk", retryable=True))
    assert type(caught.value) is VirnucError


def test_report_is_of_all_processes_of_a_lane() -> None:
    events: list[tuple[float, LaneEvent]] = [
        (100.0, started(shards=(0, 1, 2))),
        (103.0, loaded(seconds=3.0)),
        (110.0, done(0)),
        (500.0, started(shards=(1, 2))),
        (502.0, loaded(seconds=2.0)),
        (507.0, done(1)),
        (512.0, done(2)),
        (512.0, LaneFinished(lane=2, seconds=12.0)),
    ]
    report = lane_report(JournalEntry(time=time, event=event) for time, event in events)
    assert (report.lane, report.host, report.device, report.device_name) == (2, "node1", "cuda:0", "a GPU")
    assert (report.started, report.load_seconds, report.seconds) == (100.0, 5.0, 22.0)
    assert [shard.shard for shard in report.shards] == [0, 1, 2]


def test_report_of_a_lane_that_never_loaded() -> None:
    report = lane_report([JournalEntry(time=1.0, event=started())])
    assert (report.device_name, report.load_seconds, report.seconds, report.shards) == ("", 0, 0, ())
