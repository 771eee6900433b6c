"""Prefect process workers, one per work pool, all in one process; each job gets one of the worker's slots."""

import asyncio
import logging
import shlex
import sys
from abc import ABC
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments.fitness import Host, Slot
from deployments.jobs import Job, crash_orphaned_jobs
from virnuc_core.errors import DeviceLostError, DeviceMemoryError, HostError, LaneError, VirnucError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

RESTART_DELAY_SECONDS: Final = 10.0
# With another device, the job might have succeeded.
_OF_THE_DEVICE: Final = (DeviceLostError, DeviceMemoryError, LaneError)

_log = logging.getLogger(__name__)


class SlotWorker(ProcessWorker, ABC):  # ABC: does not replace Prefect's own worker of type "process"
    """Takes as many jobs as there are free slots that are fit, on a host that is fit.

    A job holds the lock of its slot until its process ends, so a restarted worker takes no job while an earlier one
    still uses the device.
    """

    def __init__(self, pool: str, name: str, slots: Sequence[Slot], host: Host, folder: Path) -> None:
        super().__init__(pool, name=name, limit=len(slots), create_pool_if_not_found=False)
        self._slots = slots
        self._host = host
        self.folder = folder

    async def get_and_submit_flow_runs(self) -> "list[FlowRun]":
        """Polls the server for as many jobs as there are slots for."""
        num_free = sum([slot.is_free() for slot in self._slots])
        if not self._host.fitness.poll() or not num_free:
            return []
        self.limiter.total_tokens = num_free + sum(slot.is_busy for slot in self._slots)
        return await super().get_and_submit_flow_runs()

    async def run(
        self, flow_run: "FlowRun", configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Runs a job in a free slot, and decides from its outcome whether slot and host get others.

        Raises:
            HostError: this host cannot do this job.
        """
        await self._host.require_fit_for(flow_run)
        slot = next((slot for slot in self._slots if slot.is_free()), None)
        if slot is None:
            raise HostError(f"{self.name} has no free slot any more.")
        job = Job(self.folder, flow_run.id)
        configuration.env |= {**slot.environment, "VIRNUC_OUTCOME": str(job.outcome)}
        configuration.command = shlex.join(
            [sys.executable, "-m", "deployments.engine", str(job.lock), str(slot.lock)]
        )
        slot.is_busy = True
        try:
            job.begin()
            result = await super().run(flow_run, configuration, task_status)
            self._judge(slot, flow_run, job.find_error(result.status_code))
            job.end()
        finally:
            slot.is_busy = False
        return result

    def _judge(self, slot: Slot, flow_run: "FlowRun", error: VirnucError | None) -> None:
        if error is None:
            slot.fitness.succeed()
            return
        if isinstance(error, HostError):
            self._host.avoid(flow_run)
        elif isinstance(error, _OF_THE_DEVICE) and slot.has_device:
            slot.fitness.fail(str(error))
        slot.fitness.check_again()
        self._host.fitness.check_again()


async def run_workers(
    factories: Sequence[Callable[[], SlotWorker]], *others: Coroutine[Any, Any, None]
) -> None:
    """Runs workers, and what else belongs to them, until cancelled; their jobs end with them."""
    await asyncio.gather(*map(_keep_running, factories), *others)


async def _keep_running(make_worker: Callable[[], SlotWorker]) -> None:
    """Restarts the worker: Prefect's exits when the server is unreachable for minutes."""
    while True:
        worker = make_worker()
        await asyncio.to_thread(crash_orphaned_jobs, worker.folder)
        try:
            await worker.start(printer=_log.info)
        except* (RuntimeError, httpx.HTTPError) as failures:
            _log.warning("worker %s ended (%r)", worker.name, failures.exceptions[0])
        _log.warning("worker %s is started again in %.0f s", worker.name, RESTART_DELAY_SECONDS)
        await asyncio.sleep(RESTART_DELAY_SECONDS)
