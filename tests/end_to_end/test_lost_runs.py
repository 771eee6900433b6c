"""Runs that ended with their worker or their host: found by what the server knows, and left alone otherwise."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event, Timer
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectAlreadyExists
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Pending, Running, Scheduled

from deployments import lost_runs
from deployments.lost_runs import crash_lost_runs, crash_runs_of, find_lost_runs
from flows import RUNS_POOL

pytestmark = pytest.mark.usefixtures("prefect_server")


@flow
def work() -> None:
    """Stands in for any flow."""


@task
def begin() -> None:
    """Stands in for what has begun a subflow."""


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=RUNS_POOL, type="process"))
        yield client


def begun(client: SyncPrefectClient, state: State[Any], worker: str | None) -> UUID:
    run = client.create_flow_run(work, state=Scheduled(), tags=["virnuc"])
    if worker:
        client.update_flow_run_labels(run.id, {"prefect.worker.name": worker})
    client.set_flow_run_state(run.id, state, force=True)
    return run.id


def state_of(client: SyncPrefectClient, run_id: UUID) -> str | None:
    return client.read_flow_run(run_id).state_name


def test_a_worker_that_ended_takes_its_runs_with_it_and_no_others(client: SyncPrefectClient) -> None:
    """Among them a run that it had, and that another one has taken since."""
    states = (Pending(), Running(), Cancelling(), Completed(), Scheduled())
    own = [begun(client, state, "host-runs") for state in states]
    others = [begun(client, Running(), "other-runs"), begun(client, Running(), None)]
    retried = begun(client, Running(), "host-runs")
    client.update_flow_run_labels(retried, {"prefect.worker.name": "other-runs"})
    crash_runs_of("host-runs")
    assert [state_of(client, run) for run in own] == [
        "Crashed",
        "Crashed",
        "Cancelled",
        "Completed",
        "Scheduled",
    ]
    assert {state_of(client, run) for run in (*others, retried)} == {"Running"}
    client.set_flow_run_state(own[-1], Cancelled(), force=True)  # or workers of other tests would take it
    message = client.read_flow_run(own[0]).state
    assert message is not None
    assert message.message == "Worker host-runs ended together with the process of this run."


def test_a_run_that_goes_on_since_it_was_found_is_left_alone(client: SyncPrefectClient) -> None:
    run_id = begun(client, Running(), "host-cpu0")
    found = client.read_flow_run(run_id)
    client.set_flow_run_state(run_id, Running(name="Retrying"), force=True)
    lost_runs._crash(client, found, "It was lost.")
    assert state_of(client, run_id) == "Retrying"


def test_runs_of_workers_that_the_server_has_not_heard_of_are_lost(client: SyncPrefectClient) -> None:
    for name in ("living", "dead"):
        client.send_worker_heartbeat(RUNS_POOL, name, 30.0)
    runs = {name: begun(client, Running(), name) for name in ("living", "dead", "unknown")}

    def lost(window: float) -> set[UUID]:
        return {run.id for run, _ in find_lost_runs(client, timedelta(seconds=window))} & set(runs.values())

    assert lost(30.0) == set()
    Event().wait(4.0)
    client.send_worker_heartbeat(RUNS_POOL, "living", 30.0)
    assert lost(2.0) == {runs["dead"]}


def test_subflows_of_a_run_that_has_ended_are_lost(client: SyncPrefectClient) -> None:
    ids: list[UUID] = []

    @flow
    def parent() -> None:
        task_run = client.create_task_run(begin, UUID(flow_run.id), "0")
        child = client.create_flow_run(work, parent_task_run_id=task_run.id, tags=["virnuc"])
        client.set_flow_run_state(child.id, Running(), force=True)
        ids.append(child.id)
        assert child.id not in {run.id for run, _ in find_lost_runs(client, timedelta(seconds=30))}

    parent()
    assert ids[0] in {run.id for run, _ in find_lost_runs(client, timedelta(seconds=30))}


def test_no_run_is_lost_until_the_server_has_answered_for_as_long(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it was away it has heard of nobody."""
    client.send_worker_heartbeat(RUNS_POOL, "away", 30.0)
    run_id = begun(client, Running(), "away")
    asked: list[str] = []
    answers = iter([OSError, None, None, None])

    def connect() -> Any:
        asked.append(state_of(client, run_id) or "")
        if next(answers, None):
            raise RuntimeError("it is away")
        return get_client(sync_client=True)

    monkeypatch.setattr(lost_runs, "connect", connect)
    stopping = Event()
    Timer(8.0, stopping.set).start()
    crash_lost_runs(stopping, window=2.0, every=0.5)
    assert asked.count("Running") >= 4
    assert state_of(client, run_id) == "Crashed"
    assert "does not respond" in caplog.text


def test_a_server_that_does_not_answer_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        crash_runs_of("host-gpu0")
    assert "cannot be marked as crashed" in caplog.text
