"""What Prefect costs a lane: subflows, runs of a deployment, requests and rows.

Prefect reads the environment when it is first imported, so `benchmarks.lane_overhead` sets it before it imports
this module.
"""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import UUID

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from benchmarks.prefect_server import Json, Server, running, wait_until
from deployments.server import GPU_POOL, server_url
from deployments.worker import QUERY_SECONDS
from flows.lanes import embed_lane
from flows.naming import lane_journal_name
from flows.pool import LANE_DEPLOYMENT
from virnuc_core.inference.events import LaneFinished, ModelsLoaded
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.run_folder import RunFolder

_SECONDS_IDLE: Final = 20.0


@task(cache_policy=NO_CACHE, persist_result=False)
def nothing() -> None:
    """A task without work."""


@flow(name="nothing", persist_result=False)
def nothing_as_flow() -> None:
    """A flow without work."""


@flow(name="parent", persist_result=False)
def inside_a_flow(repeats: int, folder: str) -> dict[str, list[float]]:
    """Seconds of what a parent calls: a task, a subflow, and a lane that finds nothing to do."""
    calls: dict[str, Callable[[], object]] = {
        "task": nothing,
        "subflow": nothing_as_flow,
        "lane": lambda: embed_lane(folder, (), lane=0, device="cpu"),
    }
    return {name: [_seconds(call) for _ in range(repeats)] for name, call in calls.items()}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def subflow_seconds(repeats: int, folder: Path) -> Json:
    """Seconds of tasks, subflows and lanes in one process, with Prefect's heartbeats and without them."""
    measured: Json = {}
    for name, frequency in (("with_heartbeat", 60), ("without_heartbeat", None)):
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: frequency}):
            flow_seconds = [_seconds(nothing_as_flow) for _ in range(repeats)]
            measured[name] = {"flow": flow_seconds, **inside_a_flow(repeats, str(folder))}
    return measured


@flow(name="parent", persist_result=False)
def submit(lanes: int, folder: str) -> tuple[list[UUID], list[float]]:
    """Submits lanes of one shard to the pool one after another: their ids, and seconds of each."""
    ids, seconds = [], []
    for lane in range(lanes):
        begin = time.perf_counter()
        parameters = {"folder": folder, "shards": [lane], "lane": lane, "device": "cpu"}
        run = run_deployment(LANE_DEPLOYMENT, parameters=parameters, timeout=0)
        seconds.append(time.perf_counter() - begin)
        assert isinstance(run, FlowRun)
        ids.append(run.id)
    return ids, seconds


def pool_seconds(server: Server, lanes: int, folder: RunFolder) -> Json:
    """What lanes of one shard cost on a pool with one worker, and what they leave in the database."""
    command = (sys.executable, "-m", "virnuc_cli", "worker", "--devices", "cpu", "--runs", "0")
    log = folder.root / "worker.log"
    with get_client(sync_client=True) as client, running(command, log, {"PREFECT_API_URL": server_url()}):
        wait_until(lambda: _has_worker(client), "the worker is online")
        before = server.requests()
        time.sleep(_SECONDS_IDLE)
        idle = server.requests() - before
        before, rows, begin = server.requests(), server.rows(), time.time()
        ids, submitted = submit(lanes, str(folder.root))
        polls = wait_until(lambda: _all_ended(client, ids), "all lanes have ended")
        took = time.time() - begin
        time.sleep(5.0)  # events and logs are written behind
        requests, grown = server.requests() - before, server.rows() - rows
        requests["POST /api/flow_runs/filter"] -= polls  # those are of this benchmark
        runs = [
            _timeline(client, run_id) | _told(folder, lane_journal_name(lane, run_id))
            for lane, run_id in enumerate(ids)
        ]
    return {
        "lanes": lanes,
        "worker_query_seconds": QUERY_SECONDS,
        "submit_seconds": submitted,
        **_phases(sorted(runs, key=lambda run: run["PENDING"])),
        "wall_seconds": took,
        "idle_worker_requests_per_second": {name: n / _SECONDS_IDLE for name, n in idle.most_common(6)},
        "requests_per_lane": {name: n / lanes for name, n in requests.most_common(25)},
        "requests_per_lane_in_all": sum(requests.values()) / lanes,
        "rows_per_lane": {name: n / lanes for name, n in grown.items()},
    }


def _has_worker(client: SyncPrefectClient) -> bool:
    return any(worker.status == "ONLINE" for worker in client.read_workers_for_work_pool(GPU_POOL))


def _all_ended(client: SyncPrefectClient, ids: Sequence[UUID]) -> bool:
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))
    runs = client.read_flow_runs(flow_run_filter=wanted)
    return all(run.state is not None and run.state.is_final() for run in runs)


def _timeline(client: SyncPrefectClient, run_id: UUID) -> dict[str, float]:
    """When a run came into each state for the first time, by the server's clock.

    Raises:
        RuntimeError: it did not end well, so its times mean nothing.
    """
    states = sorted(client.read_flow_run_states(run_id), key=lambda state: state.timestamp)
    if not states[-1].is_completed():
        raise RuntimeError(f"lane {run_id} ended {states[-1].name}: {states[-1].message}")
    return {state.type.value: state.timestamp.timestamp() for state in reversed(states)}


def _told(folder: RunFolder, journal: str) -> dict[str, float]:
    """Seconds of a lane's device process, by its journal."""
    events = [entry.event for entry in JournalTail(folder.lane_journal(journal)).read_new()]
    return {
        "load": next(event.seconds for event in events if isinstance(event, ModelsLoaded)),
        "process": next(event.seconds for event in events if isinstance(event, LaneFinished)),
    }


def _phases(runs: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds of each phase of lanes that one worker ran one after another."""
    return {
        "pending_to_running_seconds": [run["RUNNING"] - run["PENDING"] for run in runs],
        "running_to_completed_seconds": [run["COMPLETED"] - run["RUNNING"] for run in runs],
        "load_seconds": [run["load"] for run in runs],
        "process_seconds": [run["process"] for run in runs],
        "completed_to_next_pending_seconds": [b["PENDING"] - a["COMPLETED"] for a, b in pairwise(runs)],
        # What a lane costs besides its device process.
        "besides_process_seconds": [b["PENDING"] - a["PENDING"] - a["process"] for a, b in pairwise(runs)],
    }
