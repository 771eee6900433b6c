"""Repeated registration with the user's changes in between; the nightly schedule and its runs."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Running

from deployments.register import NIGHTLY, NightlyChoice, register
from deployments.server import GPU_POOL, crash_orphaned_runs, missing_pools, workers_since
from flows.pool import PLAN_DEPLOYMENT
from tests.production.conftest import Stack, wait_until
from virnuc_core.errors import UsageError

AUTOMATION = "virnuc: runs without a heartbeat have crashed"


@pytest.fixture(autouse=True)
def _server(stack: Stack) -> Iterator[None]:
    """Makes the stack's server this process's too."""
    with temporary_settings({PREFECT_API_URL: str(stack.client.api_url)}):
        yield


def note_of_nightly(choice: NightlyChoice) -> str:
    [nightly] = [item for item in register(choice) if item.name == NIGHTLY]
    assert not nightly.is_new
    return nightly.note


def scheduled(stack: Stack) -> list[FlowRun]:
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    waiting = {"deployment_id": {"any_": [nightly.id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    return stack.client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting))


def test_everything_is_there_after_up(stack: Stack) -> None:
    assert missing_pools() == []
    assert len(workers_since(datetime.now(UTC) - timedelta(seconds=60))) == 3
    names = {deployment.name for deployment in stack.client.read_deployments()}
    assert names == {"on-demand", "nightly", "gpu"}
    assert stack.client.read_work_pool("virnuc-runs").concurrency_limit == 16
    queues = stack.client.read_work_queues(work_pool_name=GPU_POOL)
    assert [queue.name for queue in sorted(queues, key=lambda queue: queue.priority)] == ["plans", "default"]
    assert stack.client.read_deployment_by_name(PLAN_DEPLOYMENT).work_queue_name == "plans"
    [automation] = stack.client.read_automations_by_name(AUTOMATION)
    assert automation.enabled


def test_registering_again_keeps_everything(stack: Stack) -> None:
    before = {deployment.id for deployment in stack.client.read_deployments()}
    again = stack.shell("deployments.register")
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == len(before) + 4
    assert all(line.startswith("updated ") for line in again.stdout.splitlines())
    assert {deployment.id for deployment in stack.client.read_deployments()} == before
    assert len(stack.client.read_automations_by_name(AUTOMATION)) == 1


@pytest.mark.slow
def test_nightly_schedule(stack: Stack, tmp_path: Path) -> None:
    assert "resting until --inbox and --out are given" in note_of_nightly(NightlyChoice())
    assert scheduled(stack) == []
    folders = NightlyChoice(inbox=str(tmp_path / "inbox"), out=str(tmp_path / "out"))
    assert note_of_nightly(folders).startswith("pool virnuc-runs, 0 2 * * * UTC, the small bundled models")
    # With too new an SQLAlchemy, nothing is ever scheduled, without an error.
    wait_until(lambda: len(scheduled(stack)) >= 3, "runs are scheduled", 90)
    first = min(run.expected_start_time for run in scheduled(stack) if run.expected_start_time)
    assert (first.hour, first.minute) == (2, 0)
    moved = note_of_nightly(NightlyChoice(cron="30 1 * * *", timezone="Europe/Berlin"))
    assert moved.startswith("pool virnuc-runs, 30 1 * * * Europe/Berlin, ")
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    assert nightly.parameters == {"mode": "pool", "inbox": folders.inbox, "out": folders.out}


@pytest.mark.slow
def test_what_a_person_has_set_stays(stack: Stack, tmp_path: Path) -> None:
    register(
        NightlyChoice(
            inbox=str(tmp_path / "inbox"),
            out=str(tmp_path / "out"),
            cron="15 3 * * *",
            timezone="Europe/Berlin",
        )
    )
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    stack.client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
    paused = "15 3 * * * Europe/Berlin, paused, "
    assert paused in note_of_nightly(NightlyChoice())
    # Changing the models must not resume the schedule.
    assert paused in note_of_nightly(NightlyChoice(models={"chunk_length": 300}))
    assert stack.client.read_deployment_by_name(NIGHTLY).parameters["inbox"] == str(tmp_path / "inbox")
    assert "paused" not in note_of_nightly(NightlyChoice(cron="0 4 * * *"))


@pytest.mark.parametrize(
    ("choice", "option"),
    [(NightlyChoice(cron="0 25 * * *"), "--cron"), (NightlyChoice(timezone="Mars/Phobos"), "--timezone")],
)
def test_schedule_that_cannot_be(choice: NightlyChoice, option: str) -> None:
    with pytest.raises(UsageError, match=f"this schedule cannot be used: {option}"):
        register(choice)


@pytest.mark.slow
def test_nightly_batch(stack: Stack, examples_dir: Path, tmp_path: Path) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    shutil.copy(examples_dir / "contigs.fa.gz", inbox)
    (inbox / "bad.fa").write_text("no sequence at all\n")
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    # In its own process; other tests cover lanes in the pool.
    asked = {"inbox": str(inbox), "out": str(out), "mode": "local", "settle_seconds": 0}
    run = stack.client.create_flow_run_from_deployment(nightly.id, parameters=asked)
    stack.wait_for(run.id, "Completed")
    assert (inbox / "rejected" / "bad.fa").exists()
    assert len(list(out.glob("contigs*/run.json"))) == 1


def test_server_that_does_not_answer() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(UsageError, match=r"127\.0\.0\.1:9/api does not answer"),
    ):
        register(NightlyChoice())


def test_no_server() -> None:
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="no Prefect server is named"),
    ):
        register(NightlyChoice())


def test_runs_that_ended_with_their_worker_are_reported(stack: Stack) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    lane = stack.client.read_deployment_by_name("embed-lane/gpu")

    def begun(state: State[Any], worker: str, pid: int) -> UUID:
        asked = {"folder": "/data/run", "shards": [0], "lane": 0}
        run = stack.client.create_flow_run_from_deployment(lane.id, parameters=asked, state=state)
        stack.client.update_flow_run(run.id, infrastructure_pid=str(pid))
        stack.client.update_flow_run_labels(run.id, {"prefect.worker.name": worker})
        return run.id

    lost = begun(Running(), "host-gpu7", process.pid)
    stopped = begun(Cancelling(), "host-gpu7", process.pid)
    at_work = begun(Running(), "host-gpu7", os.getpid())
    of_another = begun(Running(), "host-gpu8", process.pid)
    crash_orphaned_runs("host-gpu7")
    states = [stack.state(run_id) for run_id in (lost, stopped, at_work, of_another)]
    for run_id in (at_work, of_another):
        stack.client.set_flow_run_state(run_id, Cancelled(), force=True)
    assert states == ["Crashed", "Cancelled", "Running", "Running"]


def test_lost_runs_are_not_reported_to_a_server_that_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        crash_orphaned_runs("host-gpu7")
    assert "the server cannot be told" in caplog.text
