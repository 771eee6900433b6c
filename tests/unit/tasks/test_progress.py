import logging
import time

import pytest

from tasks.progress import LaneProgress, StageClock, current_progress, telling


class Listener:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def stage(self, name: str) -> None:
        self.heard.append(name)

    def lane(self, progress: LaneProgress) -> None:
        self.heard.append(progress)


def test_clock_names_stages_and_keeps_their_times() -> None:
    listener = Listener()
    clock = StageClock()
    with telling(listener):
        with clock.stage("index"):
            time.sleep(0.01)
        with clock.stage("plan"):
            pass
    assert listener.heard == ["index", "plan"]
    assert clock.seconds["index"] >= 0.01
    assert list(clock.seconds) == ["index", "plan"]


def test_without_a_listener_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tasks"):
        current_progress().stage("index")
        current_progress().lane(LaneProgress(lane=1, device="cuda:1", rows_done=5, rows_total=7))
    assert [record.getMessage() for record in caplog.records] == [
        "stage: index",
        "lane 1 on cuda:1: 5 of 7 rows",
    ]
