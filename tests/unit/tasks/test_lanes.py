"""Progress from the events of lanes."""

import socket

from tasks.progress import LaneProgress, LaneRows
from tests.made_lanes import at, done, loaded, started
from virnuc_core.inference.events import LaneEvent, LaneStarted, RowsComputed


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
    assert shown(loaded(2), RowsComputed(lane=2, rows=4)) == ("cpu", 4, 20)
    assert shown(done(0, 2)) == ("cpu", 10, 20)
    assert shown(RowsComputed(lane=2, rows=15)) == ("cpu", 15, 20)
    assert shown(started(2, host="node1.", shards=(1,))) == ("node1. cuda:0", 10, 20)
    assert shown(RowsComputed(lane=2, rows=5)) == ("node1. cuda:0", 15, 20)
    assert shown(done(1, 2)) == ("node1. cuda:0", 20, 20)


def test_the_time_that_is_left_counts_from_when_the_models_are_loaded() -> None:
    recorder = Recorder()
    rows = LaneRows(recorder)
    for moment, event in ((0, started(0)), (100, loaded(0)), (400, RowsComputed(lane=0, rows=5))):
        rows(at(moment, event))
    assert [str(progress) for progress in recorder.seen] == [
        "lane 0 on box cuda:0: 0% (0 of 20 rows)",
        "lane 0 on box cuda:0: 25% (5 of 20 rows), 15 min left",
    ]
