"""Lanes in a work pool: a real server, with threads of this process as workers."""

import _thread
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from prefect.flow_engine import run_flow
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled

from deployments.deploy import deploy
from deployments.processes import interruptible
from flows import pool
from flows.lanes import embed_lane, lane_journal_name, plan_run
from flows.pool import PoolLanes
from flows.recording import choose_lanes
from tasks import pool_runs
from tests.made_lanes import done
from tests.made_models import MadeModels
from virnuc_core.env_config import reload
from virnuc_core.errors import (
    CheckpointError,
    DeviceLostError,
    HostError,
    LaneError,
    MismatchError,
    UsageError,
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
    monkeypatch.setattr(pool_runs, "_SECONDS_BETWEEN_POLLS", 0.1)
    monkeypatch.setattr(pool, "RETRY_DELAYS_SECONDS", (0.1, 0.1))
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
def computed(root: str, mode: str) -> list[LaneReport]:
    where = LaneSettings(mode="pool", lane_minutes=A_SHARD_A_LANE, priority="urgent")
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
    path = folder.lane_journal(lane_journal_name(lane, run.id))
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


def fail(run: FlowRun) -> None:
    """A lane on a device that is sick."""
    with starting(run, "sick"):
        raise DeviceLostError("the GPU fell off the bus")


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
    assert {(run.name, run.work_queue_name) for run in worker.done} == {
        ("plan there", "plans"),
        ("lane-0 1 shards", "urgent"),
        ("lane-1 1 shards", "urgent"),
    }
    assert all(run.parent_task_run_id for run in worker.done)
    assert len({run.parent_task_run_id for run in worker.done}) == 2
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
    assert "VIRNUC_V1_ATTENTION is set for this worker and does not count" in caplog.text


def test_links_keep_their_names(contigs: Path, config: RunConfig, models: MadeModels, tmp_path: Path) -> None:
    """As in a cache whose files are links to others, and where the shared folder is a link on each host."""
    (tmp_path / "blobs").mkdir()
    blob = models.head.rename(tmp_path / "blobs" / "0123abcd")
    models.head.symlink_to(blob)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    try:
        with Worker() as worker:
            planned(str(tmp_path / "link" / "run"), str(contigs), config, "pool")
    finally:
        models.head.unlink()
        blob.rename(models.head)
    [run] = worker.done
    assert run.parameters["folder"] == str(tmp_path / "link" / "run")
    assert run.parameters["config"]["head"] == str(models.head)


def test_errors_come_back_as_what_they_are(
    root: Path,
    contigs: Path,
    config: RunConfig,
    models: MadeModels,
    other_head: Path,
    tmp_path: Path,
    client: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    bad = config.model_copy(update={"esm_model": str(tmp_path / "empty")})
    with Worker() as worker, pytest.raises(CheckpointError, match="empty"):
        planned(str(tmp_path / "other"), str(contigs), bad, "pool")
    assert len(worker.done) == 1
    plan = root / "plan.json"
    plan.write_text(plan.read_text().replace(str(models.head), str(other_head)))
    monkeypatch.setattr(pool, "_MAX_FAILURES", 2)
    message = r"2 of 2 shards could not be computed: lane 0, 1: .* head"
    with Worker() as worker, pytest.raises((CheckpointError, MismatchError), match=message):
        computed(str(root), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    assert Counter(run.parameters["lane"] for run in worker.done) == {0: 2, 1: 2}


def test_a_host_without_the_folder_is_not_held_against_the_shards(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails before its lane starts, more often than a lane may fail."""
    folder = RunFolder(root)

    def work_without_the_folder(run: FlowRun) -> None:
        token = folder.token.read_text()
        folder.token.write_text("of another host's folder")
        work_on(run)
        folder.token.write_text(token)

    ends = iter([work_without_the_folder] * 4)
    with Worker(lambda run: next(ends, pretend)(run)) as worker:
        computed(str(root), "pool")
    assert len(worker.done) == 6
    assert len(contents(root)) == 2
    assert f"HostError: {socket.gethostname()} does not see the run in {root}" in caplog.text


def test_a_lane_that_crashes_is_asked_for_again(root: Path) -> None:
    crashes = iter([crash, crash])
    with Worker(lambda run: next(crashes, pretend)(run)) as worker:
        reports = computed(str(root), "pool")
    assert len(contents(root)) == len(reports) == 2
    assert len(worker.done) == 4


def test_work_that_cannot_be_done_ends_the_run_with_all_reasons(
    root: Path, client: SyncPrefectClient
) -> None:
    def do(run: FlowRun) -> None:
        {0: crash, 1: fail}.get(run.parameters["lane"], pretend)(run)

    message = (
        r"2 of 4 shards could not be computed: lane 0: its run ended in state Crashed \(Process exited .*; "
        r"lane 1: the GPU fell off the bus"
    )
    with Worker(do) as worker, pytest.raises(LaneError, match=message):
        computed(str(with_shards(root, 4)), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    assert {run.parameters["lane"] for run in worker.done} == {0, 1, 2, 3}
    assert sorted(contents(root)) == ["shard_00002.h5", "shard_00003.h5"]


def test_a_sick_device_that_fails_everything_does_not_fail_the_run(root: Path) -> None:
    """It is idle more often than the one that works, so it gets most of the retries."""

    def slowly(run: FlowRun) -> None:
        time.sleep(0.5)
        pretend(run)

    with Worker(fail) as sick, Worker(slowly):
        computed(str(with_shards(root, 5)), "pool")
    assert len(contents(root)) == 5
    assert len(sick.done) > 5


@pytest.mark.timeout(100)  # otherwise it waits for ever
def test_a_lane_that_hangs_is_noticed_and_its_work_done_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One process is stopped with its heartbeat, one never starts; nobody is there to end them."""
    monkeypatch.setenv("VIRNUC_LANE_TIMEOUT", "2")
    reload()
    monkeypatch.setattr(pool_runs, "_SECONDS_PENDING", 2.0)
    monkeypatch.setattr(pool_runs, "_SECONDS_CANCELLING", 1.0)

    def hang(run: FlowRun) -> None:
        set_state(run, Running())

    def never_start(run: FlowRun) -> None:
        set_state(run, Pending())

    ends = iter([hang, never_start])
    with Worker(lambda run: next(ends, pretend)(run)) as worker:
        computed(str(root), "pool")
    assert len(contents(root)) == 2
    assert Counter(run.parameters["lane"] for run in worker.done) == {0: 2, 1: 2}
    assert "it hangs: no progress for 3 s" in caplog.text
    assert "it does not start: no progress for 2 s" in caplog.text


def test_lanes_of_an_earlier_attempt_are_taken_over_or_stopped(root: Path, client: SyncPrefectClient) -> None:
    folder = RunFolder(root)
    token, deployment = pool._token(folder), client.read_deployment_by_name("embed-lane/cpu")
    plan_tag = f"virnuc-plan:{read_plan(folder.plan).fingerprint[:12]}"

    def submitted(shard: int, *tags: str) -> FlowRun:
        return client.create_flow_run_from_deployment(
            deployment.id,
            parameters={
                "folder": str(root),
                "shards": [shard],
                "lane": shard,
                "device": "cpu",
                "token": token,
            },
            name=f"lane-{shard} 1 shards",
            tags=[pool._run_tag(folder), *tags],
            state=Scheduled(),
        )

    at_work, waiting, other = (
        submitted(0, plan_tag),
        submitted(1, plan_tag),
        submitted(0, "virnuc-plan:other"),
    )
    client.set_flow_run_state(at_work.id, Running(), force=True)
    worker, is_computed = Worker(pretend), threading.Event()

    def work_once_the_lanes_are_found() -> None:
        with get_client(sync_client=True) as own:
            while own.read_flow_run(other.id).state_name != "Cancelled":
                time.sleep(0.1)
        time.sleep(2.0)  # until the lane that is at work is followed
        pretend(at_work)
        with worker:
            is_computed.wait()

    elsewhere = threading.Thread(target=work_once_the_lanes_are_found, daemon=True)
    elsewhere.start()
    reports = computed(str(root), "pool")
    is_computed.set()
    elsewhere.join()
    assert client.read_flow_run(other.id).state_name == "Cancelled"
    assert [run.id for run in worker.done] == [waiting.id]
    assert [[shard.shard for shard in report.shards] for report in reports] == [[0], [1]]


def test_a_plan_of_an_earlier_run_is_stopped_and_cannot_be_written(
    root: Path, contigs: Path, config: RunConfig, client: SyncPrefectClient
) -> None:
    """As when --force starts a run over, whose planning still waits or is at work on a host that is cut off."""
    folder, stale = RunFolder(root), "0123"
    parameters = {
        "folder": str(root),
        "config": config.model_dump(mode="json"),
        "kind": "predict",
        "device": "cpu",
        "token": stale,
    }
    old = client.create_flow_run_from_deployment(
        client.read_deployment_by_name("plan-run/cpu").id,
        parameters=parameters,
        name="plan run",
        tags=[pool._run_tag(folder)],
    )

    @flow
    def plan_again() -> None:
        PoolLanes(LaneSettings(mode="pool"), ("cpu",)).plan(folder, config, "predict")

    folder.plan.unlink()
    pool._token(folder)
    with Worker(lambda run: work_on(run) if run.id != old.id else None):
        plan_again()
    assert client.read_flow_run(old.id).state_name == "Cancelled"

    written = folder.plan.read_bytes()
    with pytest.raises(HostError, match="it is of another run"):
        plan_run(**parameters)
    assert folder.plan.read_bytes() == written


def submit_while_away(root: Path, num_lanes: int, seconds: float) -> Sequence[FlowRun]:
    """Computes a run whose server is away for some seconds; returns all runs of its lanes."""
    server = SubprocessASGIServer().server_process
    assert server is not None
    stopped = threading.Event()

    def pretend_and_stop(run: FlowRun) -> None:
        pretend(run)
        if run.parameters["lane"] >= num_lanes // 2 and not stopped.is_set():
            stopped.set()
            os.kill(server.pid, signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT)).start()

    folder = RunFolder(with_shards(root, num_lanes))
    # Otherwise a request waits for a minute.
    with temporary_settings({PREFECT_API_REQUEST_TIMEOUT: 1.0}), Worker(pretend_and_stop):
        computed(str(root), "pool")
    assert stopped.is_set()
    assert len(contents(root)) == num_lanes
    of_the_run = FlowRunFilter.model_validate({"tags": {"all_": [pool._run_tag(folder)]}})
    runs: list[FlowRun] = []
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(flow_run_filter=of_the_run, offset=len(runs)):
            runs += page
    return runs


@pytest.mark.parametrize(
    ("num_lanes", "seconds"),
    [(12, 3.0), pytest.param(500, 180.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_server_that_is_away_is_waited_for(
    root: Path,
    num_lanes: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pool_runs, "_SECONDS_TO_FIRST_NOTICE", 2.0)
    runs = submit_while_away(root, num_lanes, seconds)
    assert Counter(run.parameters["lane"] for run in runs) == dict.fromkeys(range(num_lanes), 1)
    assert {run.state_name for run in runs} == {"Completed"}
    assert "Prefect's server has not answered for" in caplog.text


@pytest.mark.parametrize("num_lanes", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_cancels_all_of_its_lanes(
    root: Path, num_lanes: int, monkeypatch: pytest.MonkeyPatch, client: SyncPrefectClient
) -> None:
    monkeypatch.setattr(pool, "MIN_WAITING", num_lanes)
    interrupts = iter([_thread.interrupt_main])
    stopper = Worker(lambda run: next(interrupts, int)())
    with interruptible(), stopper, pytest.raises(KeyboardInterrupt):
        computed(str(with_shards(root, num_lanes)), "pool")
    assert client.read_flow_runs(flow_run_filter=SCHEDULED) == []
    ended = FlowRunFilter.model_validate({"tags": {"all_": [pool._run_tag(RunFolder(root))]}})
    found = client.read_flow_runs(flow_run_filter=ended, limit=200)
    assert {run.state_name for run in found} == {"Cancelled"}
    assert len(found) == min(num_lanes, 200)


def test_waiting_for_nobody_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_runs, "_SECONDS_TO_FIRST_NOTICE", 0.0)
    monkeypatch.setattr(pool_runs, "_SECONDS_BETWEEN_NOTICES", 0.5)

    def late(run: FlowRun) -> None:
        while (
            "no worker is online in the work pool virnuc-cpu: start `virnuc server worker`" not in caplog.text
        ):
            time.sleep(0.1)
        pretend(run)

    with caplog.at_level(logging.INFO, "tasks"), Worker(late):
        computed(str(root), "pool")
    assert "work pool virnuc-cpu: 2 scheduled" in caplog.text


def test_what_the_pool_needs_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    where = LaneSettings(mode="pool")
    with pytest.raises(UsageError, match=r"--devices 0,1 cannot be chosen in mode pool"):
        choose_lanes(where, ("0", "1"))
    monkeypatch.setitem(pool.WORK_POOLS, "cpu", "virnuc-absent")
    with pytest.raises(
        UsageError, match=r"lacks work pools or deployments of virnuc: run `virnuc server deploy`"
    ):
        choose_lanes(where, ("cpu",))
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="mode pool needs a Prefect server that outlives this run"),
    ):
        choose_lanes(where, ("cpu",))


def test_auto_is_the_pool_for_gpus_once_it_had_a_worker(client: SyncPrefectClient) -> None:
    def device_of_auto() -> str:
        return PoolLanes(LaneSettings(mode="pool"), ("auto",)).device

    assert device_of_auto() == "cuda"
    client.send_worker_heartbeat("virnuc-cpu", "one-cpu", 30.0)
    assert device_of_auto() == "cpu"
    client.send_worker_heartbeat("virnuc-gpu", "two-gpu", 30.0)
    assert device_of_auto() == "cuda"
