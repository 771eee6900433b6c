"""Lanes in a work pool: a real server, with threads of this process as workers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Running, Scheduled

from deployments.register import NightlyChoice, register
from flows import pool
from flows.computed_run import choose_lanes
from flows.lanes import LocalLanes, embed_lane, plan_run
from flows.pool import PoolLanes
from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core.env_config import reload
from virnuc_core.errors import CheckpointError, LaneError, MismatchError, UsageError
from virnuc_core.inference import sharding
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig

pytestmark = pytest.mark.usefixtures("prefect_server")

SCHEDULED = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
A_SHARD_A_LANE = 1e-9  # minutes


@pytest.fixture(scope="module", autouse=True)
def deployed(prefect_server: None) -> None:
    register(NightlyChoice())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SECONDS_BETWEEN_POLLS", 0.1)
    monkeypatch.setattr(pool, "RETRY_DELAYS_SECONDS", (0.1, 0.1))
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 9)  # seventeen frames in two shards


@pytest.fixture
def config(models: MadeModels) -> RunConfig:
    return models.config(chunk_length=500, devices=("auto",))


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@flow
def planned(root: str, contigs: str, config: RunConfig, mode: str) -> None:
    Path(root).mkdir()
    folder = RunFolder(Path(root))
    index_inputs(folder, [contigs], config.chunk_length, "dna")
    lanes = PoolLanes(LaneSettings(mode="pool"), ("cpu",)) if mode == "pool" else LocalLanes(("cpu",))
    lanes.plan(folder, config, "predict")


@flow
def computed(root: str, mode: str) -> list[LaneReport]:
    where = LaneSettings(mode="pool", lane_minutes=A_SHARD_A_LANE)
    lanes = PoolLanes(where, ("cpu",)) if mode == "pool" else LocalLanes(("cpu",))
    return lanes.compute(RunFolder(Path(root)))


@pytest.fixture
def root(contigs: Path, config: RunConfig, tmp_path: Path) -> Path:
    """The folder of a run that is planned here."""
    planned(str(tmp_path / "run"), str(contigs), config, "local")
    return tmp_path / "run"


def work_on(run: FlowRun) -> None:
    """Stands in for a worker's process."""
    run_flow(plan_run if run.name.startswith("plan ") else embed_lane, flow_run=run, return_type="state")


def crash(run: FlowRun) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Crashed(message="Process exited with -9"), force=True)


class Worker(threading.Thread):
    """Executes runs one after another until the block ends."""

    def __init__(self, do: Callable[[FlowRun], None] = work_on) -> None:
        super().__init__(daemon=True)
        self.done: list[FlowRun] = []
        self._do = do
        self._over = threading.Event()

    def __enter__(self) -> "Worker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        with get_client(sync_client=True) as client:
            while not self._over.wait(0.1):
                for run in client.read_flow_runs(flow_run_filter=SCHEDULED):
                    if run.next_scheduled_start_time and run.next_scheduled_start_time <= datetime.now(UTC):
                        self.done.append(run)
                        self._do(run)
                        break


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "shards").iterdir())}


def test_a_pool_gives_the_bytes_of_local_lanes(
    root: Path, contigs: Path, config: RunConfig, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    computed(str(root), "local")
    with Worker() as worker:
        planned(str(there), str(contigs), config, "pool")
        reports = computed(str(there), "pool")
    assert contents(root) == contents(there)
    assert (root / "plan.json").read_bytes() == (there / "plan.json").read_bytes()
    assert [report.lane for report in reports] == [0, 1]
    assert {run.name for run in worker.done} == {"plan there", "lane-0 1 shards", "lane-1 1 shards"}
    assert all(run.parent_task_run_id for run in worker.done)
    assert computed(str(there), "pool") == []


def test_switches_are_those_of_who_asks_for_the_run(
    contigs: Path,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker's own environment is ignored, with a warning."""

    def work_elsewhere(run: FlowRun) -> None:
        with monkeypatch.context() as patch:
            patch.delenv("VIRNUC_DISABLE_PACKING")
            patch.setenv("VIRNUC_V1_ATTENTION", "1")
            reload()
            work_on(run)

    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    reload()
    with Worker(work_elsewhere):
        planned(str(tmp_path / "run"), str(contigs), config, "pool")
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.switches == ("VIRNUC_DISABLE_PACKING",)
    assert {model.attention for model in plan.models} == {"padded"}
    assert "VIRNUC_V1_ATTENTION is set for this worker and does not count" in caplog.text


def test_errors_come_back_as_what_they_are(
    root: Path,
    contigs: Path,
    config: RunConfig,
    models: MadeModels,
    other_head: Path,
    tmp_path: Path,
    client: SyncPrefectClient,
) -> None:
    (tmp_path / "empty").mkdir()
    bad = config.model_copy(update={"esm_model": str(tmp_path / "empty")})
    with Worker(), pytest.raises(CheckpointError, match="empty"):
        planned(str(tmp_path / "other"), str(contigs), bad, "pool")
    plan = root / "plan.json"
    plan.write_text(plan.read_text().replace(str(models.head), str(other_head)))
    with Worker() as worker, pytest.raises((CheckpointError, MismatchError), match="head"):
        computed(str(root), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    assert 1 <= len(worker.done) <= 2


def test_a_lane_that_crashes_is_asked_for_again(root: Path) -> None:
    crashes = iter([crash, crash])
    with Worker(lambda run: next(crashes, work_on)(run)) as worker:
        reports = computed(str(root), "pool")
    assert len(contents(root)) == len(reports) == 2
    assert len(worker.done) == 4


def test_a_lane_that_always_crashes_ends_the_run_and_those_that_wait(
    root: Path, client: SyncPrefectClient
) -> None:
    def crash_the_first(run: FlowRun) -> None:
        if run.name.startswith("lane-0 "):
            crash(run)
        else:
            later = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))
            client.set_flow_run_state(run.id, later, force=True)

    message = r"lane 0 ended in state Crashed \(Process exited"
    with Worker(crash_the_first), pytest.raises(LaneError, match=message):
        computed(str(root), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []


def test_lanes_of_an_earlier_run_are_taken_over_or_stopped(root: Path, client: SyncPrefectClient) -> None:
    folder = RunFolder(root)
    tags = [pool._run_tag(folder), pool._plan_tag(read_plan(folder.plan))]
    deployment = client.read_deployment_by_name("embed-lane/cpu")
    at_work, waiting = (
        client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"folder": str(root), "shards": [shard], "lane": shard, "device": "cpu"},
            name=f"lane-{shard} 1 shards",
            tags=tags,
            state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=shard)),
        )
        for shard in (0, 1)
    )
    client.set_flow_run_state(at_work.id, Running(), force=True)
    elsewhere = threading.Timer(2.0, work_on, [at_work])
    elsewhere.start()
    with Worker() as worker:
        reports = computed(str(root), "pool")
    elsewhere.join()
    assert client.read_flow_run(waiting.id).state_name == "Cancelled"
    assert [run.parameters["shards"] for run in worker.done] == [[1]]
    assert [[shard.shard for shard in report.shards] for report in reports] == [[0], [1]]


def test_waiting_for_nobody_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "_SECONDS_TO_FIRST_NOTICE", 0.0)
    monkeypatch.setattr(pool, "_SECONDS_BETWEEN_NOTICES", 0.5)

    def late(run: FlowRun) -> None:
        while "no worker is online in the work pool virnuc-cpu: start `virnuc worker`" not in caplog.text:
            time.sleep(0.1)
        work_on(run)

    with caplog.at_level(logging.INFO, "flows"), Worker(late):
        computed(str(root), "pool")
    assert "work pool virnuc-cpu: 2 scheduled" in caplog.text


def test_what_the_pool_needs_is_asked_for_first(
    contigs: Path, tmp_path: Path, virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = LaneSettings(mode="pool")
    with pytest.raises(UsageError, match=r"--devices 0,1 cannot be chosen in mode pool"):
        choose_lanes(where, ("0", "1"))
    monkeypatch.setitem(pool.WORK_POOLS, "cpu", "virnuc-absent")
    with pytest.raises(UsageError, match=r"lacks work pools or deployments of virnuc: run `virnuc deploy`"):
        choose_lanes(where, ("cpu",))
    message = "mode pool needs a Prefect server that outlives this run"
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        virnuc.refused(2, message, "predict", contigs, "--out", tmp_path / "run", "--mode", "pool")
    assert not (tmp_path / "run").exists()


def test_auto_is_the_pool_for_gpus_once_it_had_a_worker(client: SyncPrefectClient) -> None:
    def device_of_auto() -> str:
        return choose_lanes(LaneSettings(mode="pool"), ("auto",)).shown_devices

    assert device_of_auto() == "cuda"
    client.send_worker_heartbeat("virnuc-cpu", "one-cpu", 30.0)
    assert device_of_auto() == "cpu"
    client.send_worker_heartbeat("virnuc-gpu", "two-gpu", 30.0)
    assert device_of_auto() == "cuda"
