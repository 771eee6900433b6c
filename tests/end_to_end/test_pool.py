"""Lanes in a work pool: a real server, with threads of this process as workers."""

import _thread
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.flow_engine import run_flow
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import Cancelling, Completed, Crashed, Failed, Pending, Running

from deployments.deploy import deploy
from deployments.processes import interruptible
from flows import lanes, pool
from flows.lanes import HELD, embed_lane, journal_name, lane_kind, plan_run
from flows.pool import PoolLanes
from flows.recording import choose_lanes
from tasks import stages
from tests.end_to_end.conftest import wait_until
from tests.made_lanes import done
from tests.made_models import MadeModels
from virnuc_core.env_config import reload
from virnuc_core.errors import (
    CheckpointError,
    DeviceLostError,
    LaneError,
    MismatchError,
    UsageError,
    VirnucError,
)
from virnuc_core.inference import sharding
from virnuc_core.inference.events import LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.plan import Shard, read_plan, write_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig

pytestmark = pytest.mark.usefixtures("prefect_server", "fast_lanes")

SCHEDULED = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
A_SHARD_A_LANE = 1e-9  # minutes


@pytest.fixture(scope="module", autouse=True)
def deployed(prefect_server: None) -> None:
    deploy()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SECONDS_BETWEEN_POLLS", 0.1)
    monkeypatch.setattr(stages, "DELAYS_SECONDS", (0.1,) * 12)
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 9)  # seventeen frames in two shards


@pytest.fixture
def config(models: MadeModels) -> RunConfig:
    return models.config(chunk_length=500, devices=("cpu",))


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
def computed(root: str, mode: str, lane_minutes: float = A_SHARD_A_LANE) -> list[LaneReport]:
    where = LaneSettings(mode="pool", lane_minutes=lane_minutes, priority="urgent")
    lanes = PoolLanes(where, ("cpu",)) if mode == "pool" else LocalLanes(("cpu",))
    return lanes.compute(RunFolder(Path(root)))


@pytest.fixture
def root(contigs: Path, config: RunConfig, tmp_path: Path) -> Path:
    """The folder of a run that is planned here, of two shards."""
    planned(str(tmp_path / "run"), str(contigs), config, "local")
    return tmp_path / "run"


def with_shards(root: Path, number: int) -> Path:
    """Plans more shards than there are frames: for lanes that only pretend to work."""
    folder = RunFolder(root)
    shards = tuple(Shard(index=i, begin=i, end=i + 1, cost=1.0) for i in range(number))
    write_plan(folder.plan, replace(read_plan(folder.plan), shards=shards))
    return root


def work_on(run: FlowRun) -> None:
    """Stands in for a worker's process."""
    run_flow(plan_run if run.name.startswith("plan ") else embed_lane, flow_run=run, return_type="state")


def set_state(run: FlowRun, state: State[Any]) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, state, force=True)


def crash(run: FlowRun) -> None:
    set_state(run, Crashed(message="Process exited with -9"))


@contextmanager
def starting(run: FlowRun, host: str) -> Iterator[LaneJournal]:
    """A lane that has started on a host, and then ends as the block does."""
    folder, lane = RunFolder(Path(run.parameters["folder"])), run.parameters["lane"]
    set_state(run, Running())
    path = folder.lane_journal(journal_name(lane_kind(lane), run.id))
    shards = tuple(run.parameters["shards"])
    start = LaneStarted(lane=lane, device="cpu", host=host, pid=1, shards=shards, rows=len(shards))
    try:
        with LaneJournal(path) as journal, journal.recording_failure(lane):
            journal.write(start)
            yield journal
    except DeviceLostError as error:
        set_state(run, Failed(message=str(error)))
    else:
        set_state(run, Completed())


def pretend(run: FlowRun) -> None:
    """Finishes a lane without computing anything."""
    folder = RunFolder(Path(run.parameters["folder"]))
    folder.shards.mkdir(exist_ok=True)
    with starting(run, "good") as journal:
        for shard in run.parameters["shards"]:
            folder.shard(shard).touch()
            journal.write(done(shard, run.parameters["lane"]))


class Worker(threading.Thread):
    """Executes runs one after another until the block ends; a run goes to one worker alone."""

    _turn: ClassVar = threading.Lock()
    _taken: ClassVar[set[UUID]] = set()

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
                        with self._turn:
                            if run.id in self._taken:
                                continue
                            self._taken.add(run.id)
                        self.done.append(run)
                        self._do(run)
                        break


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "shards").iterdir())}


def test_a_pool_gives_the_bytes_of_local_lanes(
    root: Path, contigs: Path, config: RunConfig, tmp_path: Path, client: SyncPrefectClient
) -> None:
    there = tmp_path / "there"
    computed(str(root), "local")
    with Worker() as worker:
        planned(str(there), str(contigs), config, "pool")
        reports = computed(str(there), "pool")
    assert contents(root) == contents(there)
    assert (root / "plan.json").read_bytes() == (there / "plan.json").read_bytes()
    assert [report.lane for report in reports] == [0, 1]
    assert {(run.name, run.work_queue_name) for run in worker.done} == {
        ("plan there", "plans"),
        ("contigs.fa lane 1 of 2, 1 shard", "urgent"),
        ("contigs.fa lane 2 of 2, 1 shard", "urgent"),
    }
    for run in worker.done:  # which the page shows below the task that submitted it
        assert run.parent_task_run_id
        assert client.read_task_run(run.parent_task_run_id).task_inputs["__parents__"]
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
    assert {model.token_budget for model in plan.models} == {1}
    assert "VIRNUC_V1_ATTENTION is set for this worker but has no effect" in caplog.text


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
    with Worker() as worker, pytest.raises(CheckpointError, match="empty"):
        planned(str(tmp_path / "other"), str(contigs), bad, "pool")
    assert len(worker.done) == 1
    plan = root / "plan.json"
    plan.write_text(plan.read_text().replace(str(models.head), str(other_head)))
    with Worker() as worker, pytest.raises((CheckpointError, MismatchError), match="head"):
        computed(str(root), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    assert max(Counter(run.parameters["lane"] for run in worker.done).values()) == 1


def test_a_held_lane_says_why_and_ends_with_its_run(
    root: Path, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_SECONDS_BETWEEN_CHECKS", 0.1)
    folder = RunFolder(root)

    def work_without_the_folder(run: FlowRun) -> None:
        token = folder.token.read_text()
        folder.token.write_text("of another host's folder")
        held = threading.Thread(target=work_on, args=[run])
        held.start()
        wait_until(lambda: client.read_flow_run(run.id).state_name == HELD)
        folder.token.write_text(token)
        held.join()

    ends = iter([work_without_the_folder])
    with Worker(lambda run: next(ends, pretend)(run)) as worker:
        computed(str(root), "pool")
    [held] = [
        run for run in map(client.read_flow_run, (run.id for run in worker.done)) if run.state_name == HELD
    ]
    assert held.state is not None
    assert held.state.is_completed()
    assert f"{socket.gethostname()} does not see the run in {root}" in (held.state.message or "")


def test_busy_devices_are_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that a cluster has taken and does not start, for longer than one may work without progress."""
    monkeypatch.setenv("VIRNUC_LANE_TIMEOUT", "1")
    reload()

    def start_late(run: FlowRun) -> None:
        set_state(run, Pending())
        threading.Timer(4.0, pretend, [run]).start()

    with Worker(start_late) as worker:
        computed(str(root), "pool")
    assert Counter(run.parameters["lane"] for run in worker.done) == {0: 1, 1: 1}


def test_a_lane_is_asked_for_again_while_it_gets_on_and_three_times_if_not(
    root: Path, client: SyncPrefectClient
) -> None:
    """Lane 0 crashes five times, each time after a shard; lane 1 three times without one; lane 2 always."""
    folder = RunFolder(with_shards(root, 18))
    tries = Counter[int]()

    def do(run: FlowRun) -> None:
        lane, shards = run.parameters["lane"], run.parameters["shards"]
        tries[lane] += 1
        if lane == 2 or tries[lane] <= (5, 3)[lane]:
            folder.shards.mkdir(exist_ok=True)
            if lane == 0:
                folder.shard(shards[0]).touch()
            crash(run)
        else:
            pretend(run)

    message = r"6 of 18 shards could not be computed. contigs.fa lane 3 of 3, 6 shards: its run ended as Crashed \(Process"
    with Worker(do), Worker(do), pytest.raises(LaneError, match=message):
        computed(str(root), "pool", 0.1)
    assert tries == {0: 6, 1: 4, 2: 4}
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    assert len(contents(root)) == 12


@pytest.mark.timeout(100)  # otherwise it waits for ever
def test_a_lane_that_hangs_is_noticed_and_its_work_done_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VIRNUC_LANE_TIMEOUT", "2")
    reload()
    ends = iter([lambda run: set_state(run, Running())])
    with Worker(lambda run: next(ends, pretend)(run)) as worker:
        computed(str(root), "pool")
    assert len(contents(root)) == 2
    assert sorted(Counter(run.parameters["lane"] for run in worker.done).values()) == [1, 2]
    assert "its run hangs: no progress for 3 s" in caplog.text


def test_lanes_of_an_earlier_attempt_are_cancelled(root: Path, client: SyncPrefectClient) -> None:
    @flow
    def retried() -> UUID:
        own = {"folder": str(root), "shards": [0], "lane": 0, "device": "cpu", "token": "0123"}
        before = run_deployment("embed-lane/cpu", parameters=own, timeout=0)
        assert isinstance(before, FlowRun)
        Worker._taken.add(before.id)
        with Worker(pretend):
            PoolLanes(LaneSettings(mode="pool"), ("cpu",)).compute(RunFolder(root))
        return before.id

    assert client.read_flow_run(retried()).state_name == "Cancelled"
    assert len(contents(root)) == 2


def test_a_plan_for_a_run_that_was_started_over_cannot_be_written(
    root: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(root)
    pool._token(folder)
    written = folder.plan.read_bytes()
    own = {"config": config.model_dump(mode="json"), "kind": "predict", "device": "cpu", "token": "0123"}
    monkeypatch.setattr(lanes, "_SECONDS_BETWEEN_CHECKS", 0.1)
    monkeypatch.setattr(lanes, "_is_parent_over", iter([False, False, True]).__next__)
    plan_run(folder=str(root), **own)
    assert folder.plan.read_bytes() == written


def test_a_lane_of_a_run_that_has_ended_does_not_begin(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"shards": (0,), "lane": 0, "device": "cpu", "token": pool._token(RunFolder(root))}
    monkeypatch.setattr(lanes, "_is_parent_over", lambda: True)
    state = embed_lane(folder=str(root), **own, return_state=True)
    assert state.is_cancelled()
    assert not list(RunFolder(root).lanes.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("num_lanes", "seconds"),
    [(12, 4.0), pytest.param(60, 180.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_server_that_is_away_is_waited_for(
    root: Path, num_lanes: int, seconds: float, client: SyncPrefectClient
) -> None:
    server = SubprocessASGIServer().server_process
    assert server is not None
    stopped = threading.Event()
    ids: list[UUID] = []

    def pretend_and_stop(run: FlowRun) -> None:
        ids.append(run.id)
        pretend(run)
        if run.parameters["lane"] >= num_lanes // 2 and not stopped.is_set():
            stopped.set()
            os.kill(server.pid, signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT)).start()

    # As deployed runs have it. Otherwise a request waits for a minute.
    settings = {PREFECT_API_REQUEST_TIMEOUT: 1.0, PREFECT_CLIENT_MAX_RETRIES: 9}
    with temporary_settings(settings), Worker(pretend_and_stop) as worker:
        computed(str(with_shards(root, num_lanes)), "pool")
    assert stopped.is_set()
    assert len(contents(root)) == num_lanes
    assert Counter(run.parameters["lane"] for run in worker.done) == dict.fromkeys(range(num_lanes), 1)
    assert {client.read_flow_run(run_id).state_name for run_id in ids} == {"Completed"}


@pytest.mark.parametrize("way", ["interrupted", "cancelled"])
def test_a_run_that_is_stopped_cancels_all_of_its_lanes(
    root: Path, client: SyncPrefectClient, way: str
) -> None:
    """Cancelled at the server, it needs no worker to stop."""
    seen: list[FlowRun] = []

    def parent_of(run: FlowRun) -> UUID:
        assert run.parent_task_run_id
        parent = client.read_task_run(run.parent_task_run_id).flow_run_id
        assert parent
        return parent

    def stop(run: FlowRun) -> None:
        seen.append(run)
        time.sleep(0.1)
        if len(seen) == 6 and way == "interrupted":
            _thread.interrupt_main()
        elif len(seen) == 6:
            client.set_flow_run_state(parent_of(run), Cancelling())

    error = KeyboardInterrupt if way == "interrupted" else VirnucError
    with interruptible(), Worker(stop), pytest.raises(error):
        computed(str(with_shards(root, 40)), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    own = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [parent_of(seen[0])]}})
    found = client.read_flow_runs(flow_run_filter=own)
    assert {run.state_name for run in found} <= {"Cancelled", "Cancelling"}
    assert len(found) > 5
    if way == "cancelled":  # an automation makes it Cancelled
        assert client.read_flow_run(parent_of(seen[0])).state_name == "Cancelling"


def test_waiting_for_nobody_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "_SECONDS_BETWEEN_NOTICES", 0.5)

    def late(run: FlowRun) -> None:
        wait_until(
            lambda: "no worker is online in work pool virnuc-cpu: start `virnuc server worker`" in caplog.text
        )
        pretend(run)

    with caplog.at_level(logging.INFO, "flows"), Worker(late):
        computed(str(root), "pool")
    assert re.search(r"work pool virnuc-cpu: \d scheduled", caplog.text)


def test_what_the_pool_needs_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    where = LaneSettings(mode="pool")
    with pytest.raises(UsageError, match=r"--devices 0,1 cannot be used in mode pool"):
        choose_lanes(where, ("0", "1"))
    monkeypatch.setitem(pool.WORK_POOLS, "cpu", "virnuc-absent")
    with pytest.raises(
        UsageError, match=r"has no work pools or deployments of virnuc: run `virnuc server deploy`"
    ):
        choose_lanes(where, ("cpu",))
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="no Prefect server is set: set PREFECT_API_URL"),
    ):
        choose_lanes(where, ("cpu",))


def test_auto_is_the_pool_for_gpus_once_it_had_a_worker(client: SyncPrefectClient) -> None:
    def device_of_auto() -> str:
        return PoolLanes(LaneSettings(mode="pool"), ("auto",))._device

    assert device_of_auto() == "cuda"
    client.send_worker_heartbeat("virnuc-cpu", "one-cpu", 30.0)
    assert device_of_auto() == "cpu"
    client.send_worker_heartbeat("virnuc-gpu", "two-gpu", 30.0)
    assert device_of_auto() == "cuda"
