"""Progress and reports from the journals of lanes in a pool."""

import socket
from pathlib import Path

import pytest

from tasks.lanes import LaneWatch
from tasks.progress import LaneProgress, LaneRows
from tests.made_lanes import done, failed, finished, loaded, started
from virnuc_core.inference.events import LaneEvent, LaneStarted
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.lanes import ignore
from virnuc_core.run_folder import RunFolder


class Recorder:
    """A progress display that records its calls."""

    def __init__(self) -> None:
        self.seen: list[LaneProgress] = []

    def stage(self, name: str) -> None:
        raise AssertionError

    def lane(self, progress: LaneProgress) -> None:
        self.seen.append(progress)


def test_events_become_progress() -> None:
    recorder = Recorder()
    rows = LaneRows(recorder)

    def shown(*events: LaneEvent) -> tuple[str, int, int]:
        for event in events:
            rows(event)
        [progress] = recorder.seen
        recorder.seen.clear()
        assert progress.lane == 2
        return progress.device, progress.rows_done, progress.rows_total

    here = LaneStarted(lane=2, device="cpu", host=socket.gethostname(), pid=1, shards=(0, 1), rows=20)
    assert shown(here) == ("cpu", 0, 20)
    assert shown(loaded(2), done(0, 2)) == ("cpu", 10, 20)
    assert shown(started(2, host="node1.", shards=(1,))) == ("node1. cuda:0", 10, 20)
    assert shown(done(1, 2)) == ("node1. cuda:0", 20, 20)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write(folder: RunFolder, name: str, *events: LaneEvent) -> None:
    with LaneJournal(folder.lane_journal(name)) as journal:
        for event in events:
            journal.write(event)


def test_journals_are_followed_as_they_come_and_grow(folder: RunFolder) -> None:
    seen: list[LaneEvent] = []
    watch = LaneWatch(folder, seen.append)
    watch.follow("lane-0000-a")
    watch.follow("lane-0001-b")
    assert watch.poll() == {}
    write(folder, "lane-0001-b", started(1))
    write(folder, "lane-0000-a", started(), done(0), finished())
    write(folder, "lane-0002-c", started(2))  # of another run
    assert list(watch.poll()) == ["lane-0000-a", "lane-0001-b"]
    write(folder, "lane-0001-b", loaded(1))
    write(folder, "lane-0000-a", done(1))  # a lane that has finished is not read again
    assert watch.poll() == {"lane-0001-b": [loaded(1)]}
    watch.leave("lane-0001-b")
    write(folder, "lane-0001-b", done(1))
    assert watch.poll() == {}
    assert seen == [started(), done(0), finished(), started(1), loaded(1)]
    assert [len(report.shards) for report in watch.reports] == [1, 0]
    assert [report.journal for report in watch.reports] == ["lane-0000-a", "lane-0001-b"]


def test_a_lane_of_an_earlier_run_that_is_being_stopped_is_passed_over(folder: RunFolder) -> None:
    seen: list[LaneEvent] = []
    watch = LaneWatch(folder, seen.append)
    watch.follow("lane-0000-old")
    write(folder, "lane-0000-old", done(0), started(), done(1))
    watch.poll()
    assert seen == [started(), done(1)]


def test_start_and_failure_are_the_last_of_a_lane(folder: RunFolder) -> None:
    watch = LaneWatch(folder, ignore)
    write(folder, "lane-0000-a", started(), failed())
    write(folder, "lane-0001-b", started(), failed(), started(host="other"), finished())
    write(folder, "lane-0002-c", failed())
    names = ["lane-0000-a", "lane-0001-b", "lane-0002-c", "lane-0003-d"]
    for name in names:
        watch.follow(name)
    watch.poll()
    assert [watch.failure(name) for name in names] == [failed(), None, failed(), None]
    assert [watch.start(name) for name in names] == [started(), started(host="other"), None, None]
    assert len(watch.reports) == 2
