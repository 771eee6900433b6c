"""The Prefect server of the user's settings."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

import httpx

from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from virnuc_core.errors import UsageError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import WorkerFilter
    from prefect.client.schemas.objects import FlowRun, Worker

LANE_TAG: Final = "lane"
# Events of workers about their slots.
SLOT_EVENTS: Final = "virnuc.slot."
QUARANTINED: Final = "virnuc.slot.quarantined"
RELEASED: Final = "virnuc.slot.released"


_POOLS: Final = (GPU_POOL, CPU_POOL, RUNS_POOL)

_log = logging.getLogger(__name__)


def server_url() -> str:
    """The address of the server in Prefect's settings; UsageError if none is set (a temporary one ends with the command)."""
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "no Prefect server is named: set PREFECT_API_URL, as in http://127.0.0.1:4200/api, or start one "
            "with `virnuc server up`."
        )
    return url


def server_failure() -> Exception | None:
    """Why the server does not answer; None when it does."""
    with connect() as client:
        return client.api_healthcheck()


def missing_pools() -> list[str]:
    """Work pools for processes that the server does not have, not yet or because they are for a cluster."""
    with connect() as client:
        existing = {pool.name for pool in client.read_work_pools() if pool.type == "process"}
    return [name for name in _POOLS if name not in existing]


def workers_since(moment: datetime) -> set[str]:
    """Names of the workers with a heartbeat since `moment`."""
    with connect() as client:
        heartbeats = {worker.name: worker.last_heartbeat_time for worker in _workers(client)}
    return {name for name, time in heartbeats.items() if time is not None and time >= moment}


def deployed_versions() -> list[str | None]:
    """Versions of virnuc that have deployed what lanes and plans run; none when the server does not answer."""
    from prefect.client.schemas.filters import DeploymentFilter

    tagged = DeploymentFilter.model_validate({"tags": {"all_": [LANE_TAG]}})
    try:
        with connect() as client:
            return [each.version for each in client.read_deployments(deployment_filter=tagged)]
    except (httpx.HTTPError, RuntimeError) as error:
        _log.warning("the Prefect server does not tell the version of its deployments (%r)", error)
        return []


def crash_run(run_id: UUID, message: str) -> None:
    """Marks a run as Crashed (Cancelled, when it was being cancelled) unless it has ended or waits for a retry."""
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelled, Crashed

    with connect() as client, suppress(ObjectNotFound):
        run = client.read_flow_run(run_id)
        if run.state_type in (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING):
            state = Cancelled if run.state_type == StateType.CANCELLING else Crashed
            client.set_flow_run_state(run_id, state(message=message), force=True)
            _log.info("the run %s has ended with its worker", run.name)


def is_run_over(job: "FlowRun") -> bool:
    """Whether the run that requested a lane or a plan has ended; False when the server does not answer."""
    from prefect.exceptions import ObjectNotFound

    if job.parent_task_run_id is None:
        return True
    try:
        with connect() as client:
            parent = client.read_task_run(job.parent_task_run_id).flow_run_id
            state = client.read_flow_run(parent).state if parent else None
            return state is None or state.is_final()
    except ObjectNotFound:
        return True
    except (httpx.HTTPError, RuntimeError) as error:
        _log.debug("the run of %s cannot be read: %r", job.name, error)
        return False


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A slot, or a host, that takes no jobs."""

    name: str
    reason: str
    since: datetime


def quarantines() -> list[Quarantine]:
    """What is in quarantine at workers that are online, by the events that they have sent in the last week."""
    from prefect.client.schemas.filters import WorkerFilter
    from prefect.events.filters import EventFilter, EventNameFilter

    online = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})
    with connect() as client:
        names = {worker.name for worker in _workers(client, online)}
        about_slots = EventFilter(event=EventNameFilter(prefix=[SLOT_EVENTS]))
        # the server's maximum
        page = client.read_events(about_slots, limit=50)
        events = list(page.events)
        while page.next_page:
            page = client.read_events_page(str(page.next_page))
            events += page.events
    latest: dict[str, Quarantine | None] = {}
    for event in events:  # the newest first
        worker = event.resource.id.removeprefix("virnuc.worker.").rpartition(".")[0]
        if any(name.startswith(worker) for name in names):
            found = Quarantine(
                event.resource.name or worker, str(event.payload.get("reason")), event.occurred
            )
            latest.setdefault(event.resource.id, found if event.event == QUARANTINED else None)
    return [each for each in latest.values() if each is not None]


def connect() -> "SyncPrefectClient":
    """A client of the server in Prefect's settings."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _workers(client: "SyncPrefectClient", wanted: "WorkerFilter | None" = None) -> "list[Worker]":
    """Workers of virnuc's pools; a server may not have these yet."""
    from tasks.pool_runs import read_pages

    pools = [pool.name for pool in client.read_work_pools() if pool.name in _POOLS]
    reads = [partial(client.read_workers_for_work_pool, pool, wanted) for pool in pools]
    return [worker for read in reads for worker in read_pages(read)]
