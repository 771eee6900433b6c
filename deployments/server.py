"""Pools and workers at the Prefect server."""

from datetime import datetime
from typing import TYPE_CHECKING, Final

from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from tasks.server import read_all

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Worker


_POOLS: Final = (GPU_POOL, CPU_POOL, RUNS_POOL)


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
        heartbeats = {worker.name: worker.last_heartbeat_time for worker in virnuc_workers(client)}
    return {name for name, time in heartbeats.items() if time is not None and time >= moment}


def connect() -> "SyncPrefectClient":
    """A client of the server in Prefect's settings."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def virnuc_workers(client: "SyncPrefectClient") -> "list[Worker]":
    """Workers of virnuc's pools for processes; a server may not have these yet."""
    pools = [pool.name for pool in client.read_work_pools() if pool.name in _POOLS and pool.type == "process"]
    return [worker for pool in pools for worker in read_all(client.read_workers_for_work_pool, pool)]
