"""GPU hours and cost by project and month, from a real MLflow store."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from mlflow import MlflowClient

from tasks.lanes import LaneTracking
from tasks.publishing import PROJECT_TAG
from tasks.run_record import RunRecord
from tasks.tracking import TrackedRun, tracked_run
from tasks.usage import last_month, usage_of
from tests.made_lanes import at, done, finished, loaded, started
from virnuc_core.errors import UsageError

SetEnv = Callable[..., None]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    """Shared by all tests: a new database takes seconds."""
    return MlflowClient(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


@pytest.fixture(autouse=True)
def _store(client: MlflowClient, set_env: SetEnv) -> None:
    set_env(MLFLOW_TRACKING_URI=client.tracking_uri)


def add_run(day: str, project: str, **metrics: float) -> None:
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    tags = {PROJECT_TAG: project} if project else {}
    record = RunRecord.create(None)
    TrackedRun.open(record, "run", {}, tags, start_time=begin).log_metrics(metrics)
    record.close()


@pytest.mark.parametrize(("price", "cost"), [(None, {}), ("3.5", {"gpu_cost": 7.0})])
def test_a_run_records_the_time_for_which_its_lanes_held_gpus(
    client: MlflowClient, set_env: SetEnv, price: str | None, cost: dict[str, float]
) -> None:
    if price is not None:
        set_env(VIRNUC_GPU_HOUR_PRICE=price)
    with tracked_run("pipeline", {}, {}) as run, LaneTracking(run) as tracking:
        for name, lane in (("lane-0-a", 0), ("lane-1-b", 1)):
            tracking.on_entry(name, at(0.0, started(lane)))
            tracking.on_entry(name, at(10.0, loaded(lane)))
        tracking.on_entry("lane-0-a", at(3600.0, finished(0)))
        # Its process was killed, and another one began an hour later.
        tracking.on_entry("lane-1-b", at(1800.0, done(0, lane=1)))
        tracking.on_entry("lane-1-b", at(5400.0, started(1)))
        tracking.on_entry("lane-1-b", at(7200.0, finished(1)))
    metrics = client.get_run(str(run.run_id)).data.metrics
    assert {key: value for key, value in metrics.items() if key.startswith("gpu_")} == {
        "gpu_hours": 2.0,
        **cost,
    }


def test_usage_is_summed_by_project_and_month() -> None:
    add_run("2025-02-28T23:59", "soil", gpu_hours=100.0)
    add_run("2025-03-01T00:00", "soil", gpu_hours=2.0, gpu_cost=5.0)
    add_run("2025-03-31T23:59", "soil", gpu_hours=1.5)
    add_run("2025-03-15T12:00", "", gpu_hours=0.25)
    add_run("2025-03-15T12:00", "sea", gpu_hours=9.0, gpu_cost=1.0)
    add_run("2025-03-15T12:00", "sea", sequences=10)  # a lane of it
    add_run("2025-04-01T00:00", "soil", gpu_hours=100.0)
    assert [usage.row for usage in usage_of("2025-03")] == [
        {"project": "sea", "runs": 1, "GPU hours": 9.0, "cost": 1.0},
        {"project": "soil", "runs": 2, "GPU hours": 3.5, "cost": 5.0},
        {"project": "(none)", "runs": 1, "GPU hours": 0.25, "cost": "NA"},
    ]
    assert usage_of("2025-12") == []


def test_months() -> None:
    assert last_month() < f"{datetime.now(UTC):%Y-%m}"
    with pytest.raises(UsageError, match="2025-13 is no month"):
        usage_of("2025-13")


def test_a_store_that_cannot_be_read_is_named(set_env: SetEnv) -> None:
    set_env(MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    with pytest.raises(UsageError, match="MLflow's record of the runs cannot be read"):
        usage_of("2025-03")
