import logging
import socket

import pytest

from tasks.lanes import LaneProgress, LaneRows, current_progress, use_progress
from tests.made_models import MadeRun
from tests.unit.inference.test_lane_journal import done, loaded
from virnuc_core.inference.events import LaneEvent, LaneStarted
from virnuc_core.inference.lane_journal import JournalEntry


class Listener:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def stage(self, name: str) -> None:
        self.heard.append(name)

    def lane(self, progress: LaneProgress) -> None:
        self.heard.append(progress)


def test_without_a_listener_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tasks"):
        current_progress().stage("index")
        current_progress().lane(LaneProgress(lane=1, device="cuda:1", rows_done=5, rows_total=7))
    assert [record.getMessage() for record in caplog.records] == [
        "stage: index",
        "lane 1 on cuda:1: 5 of 7 rows",
    ]


def test_journals_become_progress(finished_run: MadeRun) -> None:
    rows = [shard.end - shard.begin for shard in finished_run.plan.shards]
    here = LaneStarted(lane=2, device="cpu", host=socket.gethostname(), pid=1, shards=(0, 1))
    elsewhere = LaneStarted(lane=2, device="cuda:0", host="node1.", pid=1, shards=(1,))
    listener = Listener()
    with use_progress(listener):
        lanes = LaneRows(finished_run.plan)

        def hear(*events: LaneEvent) -> LaneProgress:
            for event in events:
                lanes.on_entry("lane-0002-a", JournalEntry(time=0.0, event=event))
            lanes.end_poll()
            [told] = listener.heard
            listener.heard.clear()
            assert isinstance(told, LaneProgress)
            return told

        total = rows[0] + rows[1]
        assert hear(here) == LaneProgress(lane=2, device="cpu", rows_done=0, rows_total=total)
        assert hear(loaded(), done(0)).rows_done == rows[0]
        again = hear(elsewhere)
        assert (again.device, again.rows_done, again.rows_total) == ("node1. cuda:0", rows[0], total)
        assert hear(done(1)).rows_done == total
        lanes.end_poll()
        assert listener.heard == []
