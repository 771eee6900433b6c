"""Progress from the events of lanes."""

import socket

from tasks.progress import LaneProgress, LaneRows
from tests.made_lanes import done, loaded, started
from virnuc_core.inference.events import LaneEvent, LaneStarted


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
