"""The Prefect server of the user's settings."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from virnuc_core.errors import UsageError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

GPU_POOL: Final = "virnuc-gpu"
CPU_POOL: Final = "virnuc-cpu"
RUNS_POOL: Final = "virnuc-runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A work pool and its queues by falling priority, each with the most runs at once over all hosts."""

    description: str
    queues: Mapping[str, int | None]
    limit: int | None = None


# Planning takes seconds and goes first, so that a new run does not wait for the lanes of others.
_LANE_QUEUES: Final = dict.fromkeys(("plans", "urgent", "normal", "bulk"))
# A device takes one lane at a time, so their pools need no limit; a run holds its slot while its lanes wait.
POOLS: Final[Mapping[str, Pool]] = {
    GPU_POOL: Pool(description="Lanes and plans on GPUs, one at a time on each", queues=_LANE_QUEUES),
    CPU_POOL: Pool(description="Lanes and plans on CPUs", queues=_LANE_QUEUES),
    RUNS_POOL: Pool(
        description="Whole runs, which wait for their lanes and put the results together",
        # Nightly runs wait for the runs of their files, which need slots, too.
        queues={"nights": 2, "urgent": None, "normal": None, "bulk": None},
        limit=16,
    ),
}
_PAGE_SIZE: Final = 200  # the server's maximum

_log = logging.getLogger(__name__)


def server_url() -> str:
    """The address of the server in Prefect's settings; UsageError if none is set (a temporary one ends with the command)."""
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "no Prefect server is named: set PREFECT_API_URL, as in http://127.0.0.1:4200/api, or start one "
            "with `virnuc up`."
        )
    return url


def server_failure() -> Exception | None:
    """Why the server does not answer; None when it does."""
    with _client() as client:
        return client.api_healthcheck()


def missing_pools() -> list[str]:
    """Work pools that the server does not have yet."""
    with _client() as client:
        existing = {pool.name for pool in client.read_work_pools()}
    return [name for name in POOLS if name not in existing]


def workers_since(moment: datetime) -> set[str]:
    """Names of the workers with a heartbeat since `moment`."""
    with _client() as client:
        workers = [worker for pool in POOLS for worker in client.read_workers_for_work_pool(pool)]
    heartbeats = {worker.name: worker.last_heartbeat_time for worker in workers}
    return {name for name, time in heartbeats.items() if time is not None and time >= moment}


def crash_orphaned_runs(worker: str) -> None:
    """Marks runs of a stopped worker of this host as Crashed if their process has ended too.

    A stopped worker kills its runs without telling the server, which would notice the missing heartbeat only minutes
    later. Runs that are still alive are left alone.
    """
    import httpx
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelled, Crashed

    message = f"Worker {worker} ended, and the process of this run with it."
    try:
        with _client() as client:
            for run in _unfinished_runs(client):
                if run.labels.get("prefect.worker.name") == worker and not _is_alive(run.infrastructure_pid):
                    state = Cancelled if run.state_type == StateType.CANCELLING else Crashed
                    client.set_flow_run_state(run.id, state(message=message), force=True)
                    _log.info("%s: the run %s has ended with it", worker, run.name)
    except httpx.HTTPError as error:
        _log.warning("%s: the server cannot be told which runs have ended with it (%r)", worker, error)


def _client() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _unfinished_runs(client: "SyncPrefectClient") -> "list[FlowRun]":
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    started = FlowRunFilter.model_validate(
        {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
    )
    pools = WorkPoolFilter.model_validate({"name": {"any_": list(POOLS)}})
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=started, work_pool_filter=pools, limit=_PAGE_SIZE, offset=len(found)
        )
        found += page
        if len(page) < _PAGE_SIZE:
            return found


def _is_alive(process_id: str | None) -> bool:
    if process_id is None or not process_id.isdigit():
        return False
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
