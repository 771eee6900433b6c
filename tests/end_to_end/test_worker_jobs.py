"""What a worker tells the Prefect server about its jobs, and asks it."""

import asyncio
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Pending, Running, Scheduled

from deployments.deploy import deploy
from deployments.fitness import Fitness
from deployments.jobs import Job, crash_orphaned_jobs
from deployments.lost_runs import find_silent_runs
from deployments.processes import only_one
from deployments.server import deployed_versions, is_run_over, quarantines
from flows import GPU_POOL
from tests.end_to_end.conftest import wait_until
from virnuc_core import __version__

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def test_a_server_that_does_not_answer_is_told_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path / "host-gpu", uuid4())
    job.begin()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        crash_orphaned_jobs(job.folder)
        assert deployed_versions() == []
    assert "the server cannot be told" in caplog.text
    assert job.lock.exists()


def test_runs_that_ended_with_their_worker_are_reported_and_those_of_a_namesake_are_not(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    deploy()
    lane = client.read_deployment_by_name("embed-lane/gpu")
    with subprocess.Popen(["true"]) as process:
        process.wait()

    def begun(state: State[Any], home: str) -> Job:
        asked = {"folder": "/data/run", "shards": [0], "lane": 0, "device": "cuda", "token": "0"}
        run = client.create_flow_run_from_deployment(lane.id, parameters=asked, state=state)
        client.update_flow_run(run.id, infrastructure_pid=str(process.pid))
        client.update_flow_run_labels(run.id, {"prefect.worker.name": "host-gpu"})
        job = Job(tmp_path / home / "host-gpu", run.id)
        job.begin()
        return job

    alive = begun(Running(), "here")
    states = {
        begun(Pending(), "here"): "Crashed",
        begun(Running(), "here"): "Crashed",
        begun(Cancelling(), "here"): "Cancelled",
        begun(Completed(), "here"): "Completed",
        begun(Scheduled(), "here"): "Scheduled",  # it is tried again
        begun(Running(), "on the namesake"): "Running",
        alive: "Running",
    }
    with only_one(alive.lock, ""):
        crash_orphaned_jobs(alive.folder)
    assert {job: client.read_flow_run(job.run_id).state_name for job in states} == states
    assert list(alive.folder.iterdir()) == [alive.lock]
    for job in states:
        client.set_flow_run_state(job.run_id, Cancelled(), force=True)


def test_a_deployment_says_which_virnuc_its_workers_need(client: SyncPrefectClient) -> None:
    deploy()
    assert set(deployed_versions()) == {__version__}
    lane = client.read_deployment_by_name("embed-lane/gpu")
    asked = {"folder": "/data/run", "shards": [0], "lane": 0, "device": "cuda", "token": "0"}
    run = client.create_flow_run_from_deployment(lane.id, parameters=asked)
    assert run.deployment_version == __version__
    assert is_run_over(run)  # nobody waits for it
    client.set_flow_run_state(run.id, Cancelled(), force=True)


def test_what_is_in_quarantine_is_told_by_events(client: SyncPrefectClient) -> None:
    deploy()

    async def nothing() -> str | None:
        return None

    async def live() -> None:
        sick, fit, gone = (
            Fitness("host-123456-gpu", "gpu0", nothing),
            Fitness("host-123456-gpu", "gpu1", nothing),
            Fitness("offline-gpu", "gpu0", nothing),
        )
        for slot in (sick, fit, gone):
            slot.quarantine("it is lost")
        fit.poll()
        assert fit._check is not None
        await fit._check

    client.send_worker_heartbeat(GPU_POOL, "host-123456-gpu")
    asyncio.run(live())
    wanted = EventFilter(event=EventNameFilter(prefix=["virnuc.slot."]))
    wait_until(lambda: len(client.read_events(wanted, limit=50).events) == 4)
    [found] = quarantines()
    assert (found.name, found.reason) == ("host-123456-gpu gpu0", "it is lost")


def test_silent_runs_have_had_heartbeats_and_none_for_a_while(client: SyncPrefectClient) -> None:
    deploy()
    lane = client.read_deployment_by_name("embed-lane/gpu")
    asked = {"folder": "/data/run", "shards": [0], "lane": 0, "device": "cuda", "token": "0"}
    silent, alive, new, never = (
        client.create_flow_run_from_deployment(lane.id, parameters=asked, state=Pending()).id
        for _ in range(4)
    )
    worker = "virnuc.worker.host"
    pulse = datetime.now(UTC)
    window = timedelta(seconds=3)

    def beat(resource: str) -> None:
        name = "virnuc.worker.pulse" if resource == worker else "prefect.flow-run.heartbeat"
        emit_event(name, {"prefect.resource.id": resource})

    for run_id in (silent, alive, never):
        client.set_flow_run_state(run_id, Running(), force=True)
    beat(f"prefect.flow-run.{silent}")
    wait_until(lambda: datetime.now(UTC) > pulse + window + timedelta(seconds=1))
    assert find_silent_runs(worker, pulse, window) is None
    client.set_flow_run_state(new, Running(), force=True)

    def look() -> list[UUID] | None:
        for resource in (f"prefect.flow-run.{alive}", worker):
            beat(resource)
        return find_silent_runs(worker, pulse, window)

    found = wait_until(look)
    assert set(found or ()) & {silent, alive, new, never} == {silent}
    for run_id in (silent, alive, new, never):
        client.set_flow_run_state(run_id, Cancelled(), force=True)
