"""Prefect process workers, one per device and one for whole runs, all in one process."""

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
    """Takes one run at a time and shows it only its own device.

    A run holds `lock` until its process ends, so a restarted worker takes no run while an earlier one still uses the
    device.
    """

    _of_this_host: ClassVar[set[UUID]] = set()

    def __init__(self, pool: str, name: str, environment: Mapping[str, str], lock: Path) -> None:
        super().__init__(pool, name=name, limit=1, create_pool_if_not_found=False)
        # Shared, so that two workers of a host do not try to submit the same run.
        self._submitting_flow_run_ids = self._of_this_host
        self._environment = environment
        self._lock = lock

    async def get_and_submit_flow_runs(self) -> "list[FlowRun]":
        """Polls the server for a run unless the device is in use."""
        return [] if _is_locked(self._lock) else await super().get_and_submit_flow_runs()

    async def run(
        self, flow_run: "FlowRun", configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Runs a flow run on the device with the command of prefect.yaml, which takes the lock."""
        configuration.env |= self._environment
        configuration.command = f"{configuration.command} {shlex.quote(str(self._lock))}"
        return await super().run(flow_run, configuration, task_status)


async def run_workers(factories: Sequence[Callable[[], ProcessWorker]]) -> None:
    """Runs workers until cancelled; their runs end with them."""
    await asyncio.gather(*map(_keep_running, factories))


async def _keep_running(make_worker: Callable[[], ProcessWorker]) -> None:
    """Restarts the worker: Prefect's exits when the server is unreachable for minutes."""
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
