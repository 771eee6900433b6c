from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.lanes import LaneTracking
from tasks.tracking import TrackedRun, tracked_run
from tests.made_lanes import at, done, failed, finished, loaded, sample, started
from virnuc_core import env_config
from virnuc_core.inference.events import ShardDone


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: a new database takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    return MlflowClient(store)


@pytest.fixture
def run(client: MlflowClient) -> Iterator[TrackedRun]:
    with tracked_run("pipeline", {}, {}) as run:
        yield run


def lanes_of(client: MlflowClient, run: TrackedRun) -> dict[str, Run]:
    assert run.run_id is not None
    experiment = client.get_run(run.run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    return {lane.data.tags["virnuc.journal"]: lane for lane in found}


def history(client: MlflowClient, run_id: str | None, key: str) -> list[tuple[int, float, float]]:
    points = client.get_metric_history(str(run_id), key)
    return sorted((point.step, point.timestamp / 1000, point.value) for point in points)


def test_lane_is_a_run_inside_with_its_figures_over_time(client: MlflowClient, run: TrackedRun) -> None:
    told = [
        started(),
        loaded(),
        sample(0.5, 10),
        sample(0.7, 12),
        done(0),
        sample(1.0, 11),
        done(1, forward=0.25),
    ]
    with LaneTracking(run, every=0.0) as tracking:
        for second, event in enumerate([*told, finished()]):
            tracking.on_entry("lane-0000-a", at(100.0 + second, event))
            tracking.end_poll()
    lane = lanes_of(client, run)["lane-0000-a"]
    assert lane.info.run_name == "lane 0 on box cuda:0"
    assert (lane.info.status, lane.info.start_time, lane.info.end_time) == ("FINISHED", 100_000, 107_000)
    assert lane.data.params == {
        "lane": "0",
        "host": "box",
        "device": "cuda:0",
        "shards": "2",
        "device_name": "NVIDIA Made",
    }
    lane_id = lane.info.run_id
    assert history(client, lane_id, "progress/sequences_per_second") == [(1, 104.0, 20.0), (2, 106.0, 40.0)]
    assert history(client, lane_id, "progress/esm2_tokens_per_second") == [(1, 104.0, 2e3), (2, 106.0, 4e3)]
    assert history(client, lane_id, "progress/esm2_packing_efficiency")[0][2] == 0.5
    assert history(client, lane_id, "progress/gpu_utilization") == [(1, 104.0, 0.6), (2, 106.0, 1.0)]
    assert [value for *_, value in history(client, lane_id, "progress/gpu_memory_gb")] == [12.0, 11.0]
    final = lane.data.metrics
    assert final["sequences"] == 20
    assert final["sequences_per_second"] == 4.0  # 20 sequences in 7 s, of which 2 to load
    assert final["starts"] == 1
    assert final["gpu_memory_gb"] == 12.0
    files = {file.path for file in client.list_artifacts(str(run.run_id))}
    assert "throughput.png" in files


def test_run_has_the_sum_over_the_lanes_that_are_at_work(client: MlflowClient, run: TrackedRun) -> None:
    with LaneTracking(run) as tracking:
        for lane in (0, 1):
            tracking.on_entry(f"lane-{lane}", at(0.0, started(lane)))
        tracking.on_entry("lane-0", at(1.0, done(0, lane=0)))
        tracking.on_entry("lane-1", at(2.0, done(1, lane=1, forward=1.0)))
        tracking.on_entry("lane-0", at(3.0, finished(0)))
        tracking.on_entry("lane-1", at(4.0, done(2, lane=1, frames=5, forward=1.0)))
        tracking.on_entry("lane-1", at(5.0, finished(1)))
    key = "progress/sequences_per_second"
    assert history(client, run.run_id, key) == [(1, 1.0, 20.0), (2, 2.0, 30.0), (3, 4.0, 5.0)]
    assert [value for *_, value in history(client, run.run_id, "progress/sequences")] == [10, 20, 25]
    assert [value for *_, value in history(client, run.run_id, "progress/shards")] == [1, 2, 3]


def test_status_tells_how_a_lane_ended(client: MlflowClient, run: TrackedRun) -> None:
    with LaneTracking(run) as tracking:
        for name in ("failed", "killed", "again"):
            tracking.on_entry(name, at(0.0, started()))
            tracking.on_entry(name, at(1.0, loaded()))
        tracking.on_entry("failed", at(2.0, failed()))
        # Its process died, and another one on another machine went on.
        tracking.on_entry("again", at(5.0, started(host="other")))
        tracking.on_entry("again", at(6.0, loaded()))
        tracking.on_entry("again", at(7.0, finished()))
    lanes = lanes_of(client, run)
    statuses = {name: lane.info.status for name, lane in lanes.items()}
    assert statuses == {"failed": "FAILED", "killed": "KILLED", "again": "FINISHED"}
    assert lanes["again"].data.metrics["starts"] == 2
    assert lanes["again"].data.params["host"] == "box"


def test_news_are_written_now_and_then(client: MlflowClient, run: TrackedRun) -> None:
    key = "progress/shards"
    with LaneTracking(run, every=3600.0) as tracking:
        tracking.on_entry("lane", at(0.0, started()))
        tracking.end_poll()
        tracking.on_entry("lane", at(1.0, done(0)))
        tracking.end_poll()
        assert history(client, run.run_id, key) == []
    assert len(history(client, run.run_id, key)) == 1


def test_lane_without_a_start_is_not_a_lane_of_this_run(client: MlflowClient, run: TrackedRun) -> None:
    with LaneTracking(run) as tracking:
        tracking.on_entry("lane", at(0.0, failed()))
        tracking.on_entry("lane", at(0.0, done(0)))
    assert lanes_of(client, run) == {}


def test_store_that_is_not_there_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    env_config.reload()
    with tracked_run("pipeline", {}, {}) as run, LaneTracking(run, every=0.0) as tracking:
        for event in (started(), loaded(), done(0), sample(0.5, 1), finished()):
            tracking.on_entry("lane", at(0.0, event))
            tracking.end_poll()
    assert run.run_id is None


def test_shard_that_took_no_time_has_no_speed(client: MlflowClient, run: TrackedRun) -> None:
    at_once: ShardDone = done(0, forward=0.0)
    with LaneTracking(run) as tracking:
        tracking.on_entry("lane", at(0.0, started()))
        tracking.on_entry("lane", at(1.0, at_once))
    assert history(client, run.run_id, "progress/sequences_per_second") == [(1, 1.0, 0.0)]
