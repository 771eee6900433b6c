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
    for name in ("lane-0000-a", "lane-0001-b", "lane-0002-c"):
        watch.follow(name)
    watch.poll()
    write(folder, "lane-0001-b", started(1))
    write(folder, "lane-0000-a", started(), done(0), finished())
    write(folder, "lane-0003-d", started(2))  # of another run
    watch.poll()
    write(folder, "lane-0001-b", loaded(1))
    assert watch.num_events("lane-0001-b") == 1
    watch.leave("lane-0001-b")
    write(folder, "lane-0001-b", done(1))
    watch.poll()
    assert seen == [started(), done(0), finished(), started(1), loaded(1)]
    assert [(report.journal, len(report.shards)) for report in watch.reports()] == [
        ("lane-0000-a", 1),
        ("lane-0001-b", 0),
    ]


def test_the_error_of_a_lane_is_the_last_that_it_has_told(folder: RunFolder) -> None:
    watch = LaneWatch(folder, ignore)
    events = {
        "lane-0000-a": (started(), failed()),
        "lane-0001-b": (started(), failed(), started(host="other"), finished()),
        "lane-0002-c": (),
    }
    for name in events:
        watch.follow(name)
        write(folder, name, *events[name])
        watch.leave(name)
    errors = [watch.error(name, "it crashed") for name in events]
    assert [type(error).__name__ for error in errors] == [failed().error, "LaneError", "LaneError"]
    assert [str(error) for error in errors] == [failed().message, "it crashed", "it crashed"]
