"""Which device slots of this host may take jobs: checks, and quarantine of what is not fit."""

import asyncio
import logging
import math
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Final

from deployments.server import QUARANTINED, RELEASED, deployed_versions, is_run_over
from virnuc_core.doctor.preflight import host_fault, version_fault
from virnuc_core.env_config import child_environment
from virnuc_core.errors import HostError
from virnuc_core.files import try_lock
from virnuc_core.run_folder import RunFolder

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

# Between checks of what is in quarantine.
CHECK_SECONDS: Final = 60.0
# In a row, although each check between them passed.
MAX_FAILURES: Final = 3
# The first import of torch from a network file system takes a minute.
_PROGRAM_SECONDS: Final = 180.0
_FOLDER_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1

_GPU_CHECK: Final = (sys.executable, "-m", "virnuc_core.doctor.preflight")
_IMPORTS: Final = (sys.executable, "-c", "import flows.lanes")

_log = logging.getLogger(__name__)


class Fitness:
    """Whether a slot, or the host, may take jobs: after a check that passes, until the next job that fails.

    Attributes:
        reason: why it is in quarantine; None when it is not.
    """

    def __init__(self, worker: str, name: str, find_fault: Callable[[], Awaitable[str | None]]) -> None:
        self.reason: str | None = None
        self._resource = {
            "prefect.resource.id": f"virnuc.worker.{worker}.{name}",
            "prefect.resource.name": f"{worker} {name}",
        }
        self._find_fault = find_fault
        self._failures: list[str] = []
        self._is_checked = self._has_passed = False
        self._due = 0.0
        self._check: asyncio.Task[None] | None = None

    def poll(self) -> bool:
        """Whether jobs may be taken; starts a check that is due."""
        if time.monotonic() >= self._due and (self._check is None or self._check.done()):
            self._due = math.inf
            self._check = asyncio.create_task(self._run_check())
        return self._is_checked and self.reason is None

    def check_again(self) -> None:
        """No job is taken before the next check."""
        self._is_checked, self._due = False, 0.0

    def succeed(self) -> None:
        """A job has succeeded."""
        self._failures.clear()

    def fail(self, message: str) -> None:
        """A job has failed, and this slot may be the reason."""
        self._failures.append(message)
        self.check_again()

    def quarantine(self, reason: str) -> None:
        """Takes no jobs until a check passes."""
        if reason != self.reason:
            self.reason = reason
            _log.warning("%s is in quarantine: %s", self._resource["prefect.resource.name"], reason)
            self._emit(QUARANTINED, reason)

    async def _run_check(self) -> None:
        try:
            reason = await self._find_fault()
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"its check failed: {error!r}"
        if self._due < math.inf:
            return  # something has happened since
        self._is_checked = True
        if reason is not None:
            self.quarantine(reason)
            self._due = time.monotonic() + CHECK_SECONDS
        elif len(self._failures) >= MAX_FAILURES:
            self.quarantine(
                f"{len(self._failures)} jobs in a row failed here, though the device passes its check; the last: "
                f"{self._failures[-1]} Start `virnuc server worker` again when it is repaired."
            )
        elif self.reason is not None or not self._has_passed:
            if self.reason is not None:
                _log.warning("%s is released from quarantine", self._resource["prefect.resource.name"])
            self.reason, self._has_passed = None, True
            # Also at the start: the server may remember a quarantine of an earlier worker.
            self._emit(RELEASED, "it has passed its check")

    def _emit(self, event: str, reason: str) -> None:
        from prefect.events import emit_event

        emit_event(event, self._resource, payload={"reason": reason})


class Slot:
    """A place for one job at a time. `lock` is held by the process of the job, or of a check, which may survive the worker.

    Attributes:
        environment: variables of its jobs.
        is_busy: whether a job of this worker has it.
    """

    def __init__(self, worker: str, name: str, environment: Mapping[str, str], lock: Path) -> None:
        self.fitness = Fitness(worker, name, self._find_fault)
        self.environment = environment
        self.lock = lock
        self.is_busy = False

    @property
    def has_device(self) -> bool:
        """Whether its jobs compute; whole runs do not."""
        return bool(self.environment)

    def is_free(self) -> bool:
        """Whether it can have a job now; starts a check that is due."""
        return not self.is_busy and not is_locked(self.lock) and self.fitness.poll()

    async def _find_fault(self) -> str | None:
        if not self.environment.get("CUDA_VISIBLE_DEVICES"):
            return None
        return await fault_of_program(_GPU_CHECK, self.environment, self.lock)


class Host:
    """This host: its disk, its installation, and the folders of jobs, which it must see."""

    def __init__(self, host_id: str) -> None:
        self.fitness = Fitness(host_id, "host", self._find_fault)
        self._unseen: dict[str, FlowRun] = {}

    async def require_fit_for(self, job: "FlowRun") -> None:
        """Checks that this host has the version and the folder of a job.

        Raises:
            HostError: it does not, and takes no jobs until it does.
        """
        if fault := version_fault(job.deployment_version):
            self.fitness.quarantine(fault)
            self.fitness.check_again()
            raise HostError(fault)
        if fault := await _folder_fault(job):
            self.avoid(job)
            raise HostError(fault)

    def avoid(self, job: "FlowRun") -> None:
        """Takes no jobs until the folder of this one, which failed here, is seen; or until its run has ended."""
        self._unseen[str(job.parameters.get("folder"))] = job
        self.fitness.check_again()

    async def _find_fault(self) -> str | None:
        versions = await asyncio.to_thread(deployed_versions)
        faults = (host_fault(), *map(version_fault, versions))
        if found := next(filter(None, faults), None) or await fault_of_program(_IMPORTS, {}):
            return found
        for folder, job in list(self._unseen.items()):
            if (fault := await _folder_fault(job)) and not await asyncio.to_thread(is_run_over, job):
                return fault
            del self._unseen[folder]
        return None


async def fault_of_program(
    command: Sequence[str], environment: Mapping[str, str], lock: Path | None = None
) -> str | None:
    """The last line of what a program says is wrong; None when it ends well. It holds `lock`, even when it hangs for good."""
    with ExitStack() as files:
        held = [files.enter_context(lock.open("a"))] if lock else []
        said = files.enter_context(TemporaryFile())
        if not all(map(try_lock, held)):
            return "a job of an earlier worker has it"
        process = subprocess.Popen(
            command,
            env=child_environment() | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[file.fileno() for file in held],
            start_new_session=True,  # a signal to the worker is no verdict on the device
        )
        try:
            async with asyncio.timeout(_PROGRAM_SECONDS):
                while process.poll() is None:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            return f"no answer from its check within {_PROGRAM_SECONDS:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # it waits for a driver
                    process.wait(1)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return (
        (lines[-1] if lines else f"its check ended with {process.returncode}") if process.returncode else None
    )


def is_locked(lock: Path) -> bool:
    """Whether a process holds a lock; makes the file."""
    with lock.open("a") as file:
        return not try_lock(file)


async def _folder_fault(job: "FlowRun") -> str | None:
    """Why the folder of a lane or a plan is not the one that its run sees; None for other jobs."""
    folder, token = job.parameters.get("folder"), job.parameters.get("token")
    if folder is None or token is None:
        return None
    try:
        async with asyncio.timeout(_FOLDER_SECONDS):
            await asyncio.to_thread(RunFolder(Path(folder)).require_token, token)
    except TimeoutError:
        return f"{folder} does not answer within {_FOLDER_SECONDS:.0f} s: see to the shared folder."
    except HostError as error:
        return str(error)
    return None
