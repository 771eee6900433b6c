"""GPU hours of a run, in a real MLflow store."""

from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from tasks.lanes import LaneTracking
from tasks.tracking import tracked_run
from tests.made_lanes import at, done, finished, loaded, started


def test_a_run_records_the_time_for_which_its_lanes_held_gpus(
    tmp_path: Path, set_env: Callable[..., None]
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    set_env(MLFLOW_TRACKING_URI=uri)
    with tracked_run("pipeline", {}, {}) as run, LaneTracking(run) as tracking:
        for name, lane in (("lane-0-a", 0), ("lane-1-b", 1)):
            tracking.on_entry(name, at(0.0, started(lane)))
            tracking.on_entry(name, at(10.0, loaded(lane)))
        tracking.on_entry("lane-0-a", at(3600.0, finished(0)))
        # Its process was killed, and another one began an hour later.
        tracking.on_entry("lane-1-b", at(1800.0, done(0, lane=1)))
        tracking.on_entry("lane-1-b", at(5400.0, started(1)))
        tracking.on_entry("lane-1-b", at(7200.0, finished(1)))
    metrics = MlflowClient(uri).get_run(str(run.run_id)).data.metrics
    assert {key: value for key, value in metrics.items() if key.startswith("gpu_")} == {"gpu_hours": 2.0}
