from pathlib import Path

import pytest

from tasks.lanes import LaneWatch
from tests.unit.inference.test_lane_journal import done, loaded, started
from virnuc_core.inference.events import LaneEvent, LaneFailed, LaneFinished
from virnuc_core.inference.lane_journal import JournalEntry, LaneJournal
from virnuc_core.run_folder import RunFolder

FAILED = LaneFailed(lane=2, error="LaneError", message="died", retryable=True)
FINISHED = LaneFinished(lane=2, seconds=3.0)


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, LaneEvent] | None] = []

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        self.heard.append((name, entry.event))

    def end_poll(self) -> None:
        self.heard.append(None)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def tell(folder: RunFolder, name: str, *events: LaneEvent) -> None:
    with LaneJournal(folder.lane_journal(name)) as journal:
        for event in events:
            journal.write(event)


def test_hears_lanes_as_they_come_and_go_on(folder: RunFolder) -> None:
    listener = Listener()
    watch = LaneWatch(folder, [listener])
    watch.poll()
    tell(folder, "lane-0001-b", started())
    tell(folder, "lane-0000-a", started())
    tell(folder, "plan-c", FAILED)
    watch.poll()
    tell(folder, "lane-0001-b", loaded())
    watch.poll()
    assert listener.heard == [
        *(None, ("lane-0000-a", started()), ("lane-0001-b", started())),
        *(None, ("lane-0001-b", loaded()), None),
    ]


def test_earlier_runs_are_passed_over_unless_they_are_adopted(folder: RunFolder) -> None:
    tell(folder, "lane-0000-old", started(), FAILED)
    tell(folder, "lane-0001-ours", started(), loaded())
    tell(folder, "lane-0002-same", started(), done(0))
    listener = Listener()
    watch = LaneWatch(folder, [listener])
    watch.adopt("lane-0001-ours")
    tell(folder, "lane-0000-old", done(0))  # on its way out
    tell(folder, "lane-0002-same", started(pid=8), done(1))  # the same run, tried again
    watch.poll()
    assert listener.heard == [
        *(("lane-0001-ours", started()), ("lane-0001-ours", loaded())),
        *(("lane-0002-same", started(pid=8)), ("lane-0002-same", done(1)), None),
    ]
    assert [len(report.shards) for report in watch.reports] == [0, 1]


def test_failure_is_the_last_word_of_a_lane(folder: RunFolder) -> None:
    watch = LaneWatch(folder)
    tell(folder, "lane-0000-a", started(), FAILED)
    tell(folder, "lane-0001-b", started(), FAILED, started(), FINISHED)
    tell(folder, "lane-0002-c", FAILED)
    watch.poll()
    assert watch.failure("lane-0000-a") == FAILED
    assert watch.failure("lane-0001-b") is None
    assert watch.failure("lane-0002-c") == FAILED
    assert watch.failure("lane-0003-d") is None
    assert len(watch.reports) == 2


def test_a_finished_lane_is_not_read_again(folder: RunFolder) -> None:
    watch = LaneWatch(folder)
    tell(folder, "lane-0000-a", started(), done(0), FINISHED)
    watch.poll()
    tell(folder, "lane-0000-a", done(1))
    watch.poll()
    assert [len(report.shards) for report in watch.reports] == [1]
