"""The Prefect server of the user's settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from virnuc_core.errors import UsageError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Worker


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
    return [name for name in POOLS if name not in existing]


def workers_since(moment: datetime) -> set[str]:
    """Names of the workers with a heartbeat since `moment`."""
    with connect() as client:
        heartbeats = {worker.name: worker.last_heartbeat_time for worker in virnuc_workers(client)}
    return {name for name, time in heartbeats.items() if time is not None and time >= moment}


def connect() -> "SyncPrefectClient":
    """A client of the server in Prefect's settings."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def virnuc_workers(client: "SyncPrefectClient") -> "Iterator[Worker]":
    """Workers of virnuc's pools for processes; a server may not have these yet."""
    for pool in client.read_work_pools():
        if pool.name in POOLS and pool.type == "process":
            offset = 0
            while page := client.read_workers_for_work_pool(pool.name, offset=offset, limit=200):
                yield from page
                offset += len(page)
