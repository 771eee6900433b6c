"""Prefect's process workers, all of a host in one process: one for each device, and one for whole runs."""

import asyncio
import fcntl
import logging
import shlex
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

import httpx
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments.server import crash_orphaned_runs

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

RESTART_DELAY_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class GpuProcessWorker(ProcessWorker, ABC):  # ABC: does not replace Prefect's own worker of type "process"
    """Takes one run at a time, which sees one device only.

    A run holds a lock on its device until its process ends. After a worker was killed, the next one takes no run
    for the device before the last one there has ended.

    Args:
        pool: the work pool.
        name: of the worker.
        environment: variables for the runs.
        lock: the lock file of the device.
    """

    _of_this_host: ClassVar[set[UUID]] = set()

    def __init__(self, pool: str, name: str, environment: Mapping[str, str], lock: Path) -> None:
        super().__init__(pool, name=name, limit=1, create_pool_if_not_found=False)
        # Shared, so that two workers of a host do not try to submit the same run.
        self._submitting_flow_run_ids = self._of_this_host
        self._environment = environment
        self._lock = lock

    async def get_and_submit_flow_runs(self) -> "list[FlowRun]":
        """Asks the server for a run, unless the device is in use."""
        return [] if _is_locked(self._lock) else await super().get_and_submit_flow_runs()

    async def run(
        self, flow_run: "FlowRun", configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Runs a flow run on the device; its command is that of prefect.yaml, which takes the lock."""
        configuration.env |= self._environment
        configuration.command = f"{configuration.command} {shlex.quote(str(self._lock))}"
        return await super().run(flow_run, configuration, task_status)


async def run_workers(factories: Sequence[Callable[[], ProcessWorker]]) -> None:
    """Runs workers until it is cancelled, which ends their runs as well."""
    await asyncio.gather(*map(_keep_running, factories))


async def _keep_running(make_worker: Callable[[], ProcessWorker]) -> None:
    """A worker of Prefect's gives up when the server is away for minutes."""
    while True:
        worker = make_worker()
        await asyncio.to_thread(crash_orphaned_runs, worker.name)
        try:
            await worker.start(printer=_log.info)
        except* (RuntimeError, httpx.HTTPError) as failures:
            _log.warning("worker %s ended (%r)", worker.name, failures.exceptions[0])
        _log.warning("worker %s is started again in %.0f s", worker.name, RESTART_DELAY_SECONDS)
        await asyncio.sleep(RESTART_DELAY_SECONDS)


def _is_locked(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
