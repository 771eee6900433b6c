"""Tells the server of runs that ended with their worker or their host, which nobody else does.

Everything goes by the server: who took a run, when that worker was last heard of, and what time it is. A run that has been
begun again elsewhere is left alone.
"""

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Final

import httpx

from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from tasks.server import connect, read_all, server_time

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, Worker

_WORKER: Final = "prefect.worker.name"

_log = logging.getLogger(__name__)


def crash_runs_of(worker: str) -> None:
    """Marks the unfinished runs of a worker of this host that is not running as Crashed, or Cancelled if that was wanted."""
    try:
        with connect() as client:
            for run in _begun_runs(client):
                if run.labels.get(_WORKER) == worker:
                    _crash(client, run, f"Worker {worker} ended together with the process of this run.")
    except (httpx.HTTPError, RuntimeError) as error:
        _log.warning(
            "worker %s: its runs cannot be marked as crashed on the Prefect server (%r)", worker, error
        )


def crash_lost_runs(stopping: Event, window: float = 240.0, every: float = 60.0) -> None:
    """Marks runs whose worker was not heard of for `window` seconds, by default eight of its heartbeats; looks every `every` seconds until `stopping`.

    Only while the server has answered without a break for as long: after one, no worker was heard of.
    """
    answering_since = time.monotonic()
    while not stopping.wait(every):
        try:
            with connect() as client:
                if time.monotonic() - answering_since > window:
                    lost = list(find_lost_runs(client, timedelta(seconds=window)))
                    for run, message in lost:
                        _crash(client, run, message)
                else:
                    client.request("GET", "/health")
        except (httpx.HTTPError, RuntimeError) as error:
            answering_since = time.monotonic()
            _log.warning(
                "the Prefect server does not respond (%r): no run is marked as lost meanwhile", error
            )


def find_lost_runs(client: "SyncPrefectClient", window: timedelta) -> "Iterator[tuple[FlowRun, str]]":
    """Runs whose worker the server has not heard of, and subflows in a process whose run has ended; with the reason."""
    since = server_time(client) - window
    heard = {worker.name: worker.last_heartbeat_time for worker in virnuc_workers(client)}
    silent = {name for name, moment in heard.items() if moment is not None and moment < since}
    for run in _begun_runs(client):
        taken_by = run.labels.get(_WORKER)
        if taken_by in silent:
            yield run, f"No heartbeat from worker {taken_by} for {window.total_seconds():.0f} s."
        elif taken_by is None and run.parent_task_run_id is not None:
            parent = client.read_task_run(run.parent_task_run_id).flow_run_id
            state = client.read_flow_run(parent).state if parent else None
            if state is not None and state.is_final():
                yield run, "The run that it belongs to has ended."


def virnuc_workers(client: "SyncPrefectClient") -> "list[Worker]":
    """Workers of virnuc's pools for processes; a server may not have these yet."""
    own = (GPU_POOL, CPU_POOL, RUNS_POOL)
    pools = [pool.name for pool in client.read_work_pools() if pool.name in own and pool.type == "process"]
    return [worker for pool in pools for worker in read_all(client.read_workers_for_work_pool, pool)]


def _begun_runs(client: "SyncPrefectClient") -> "list[FlowRun]":
    """Runs of virnuc that a worker has taken, and what they run themselves."""
    from prefect.client.schemas.filters import FlowRunFilter

    wanted = FlowRunFilter.model_validate(
        {"tags": {"all_": ["virnuc"]}, "state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
    )
    return read_all(client.read_flow_runs, flow_run_filter=wanted)


def _crash(client: "SyncPrefectClient", found: "FlowRun", message: str) -> None:
    """Ends a run as it was found; one that has got another state or attempt meanwhile is left alone."""
    from prefect.states import Cancelled, Crashed

    run = client.read_flow_run(found.id)
    if run.state is None or found.state is None or run.state.id != found.state.id:
        return
    ended = Cancelled if run.state.is_cancelling() else Crashed
    client.set_flow_run_state(run.id, ended(message=message))
    _log.info("run %s has ended: %s", run.name, message)
