"""The workers of this host: one per GPU, and one for whole runs."""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deployments.processes import interruptible, only_one
from deployments.server import (
    GPU_POOL,
    RUNS_POOL,
    crash_orphaned_runs,
    missing_pools,
    server_failure,
    server_url,
)
from virnuc_core.env_config import available_threads, child_environment, env
from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference.nvidia_smi import query_gpus

# Prefect's default of 10 s would leave a GPU idle before each lane.
QUERY_SECONDS: Final = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerChoice:
    """What this host's workers serve.

    Attributes:
        devices: "auto" for every GPU, or the CPU without any; "cpu"; or GPU indices such as "0,1".
        workers: on the CPU; None is 1.
        runs: number of concurrent whole runs, 0 for none.
    """

    devices: str = "auto"
    workers: int | None = None
    runs: int = 4


def work(choice: WorkerChoice) -> None:
    """Runs the workers of this host until SIGINT or SIGTERM; their runs end with them.

    Raises:
        KeyboardInterrupt: the signal.
        UsageError: no server is configured, it has no work pools yet, or the choice is invalid.
        DeviceError: a requested GPU does not exist.
    """
    devices = device_environments(choice)
    names = worker_names(choice)
    # Before Prefect reads its settings; runs inherit it as well.
    os.environ.update(worker_environment())
    url = server_url()
    with interruptible(), reserving_names(names):
        if (failure := server_failure()) is not None:
            _log.warning("the Prefect server at %s does not answer (%s); waiting for it", url, failure)
            while server_failure() is not None:
                time.sleep(1)
        if missing := missing_pools():
            raise UsageError(
                f"the Prefect server at {url} has no work pool {' and no '.join(missing)}: make them with `virnuc deploy`."
            )
        from prefect.workers.process import ProcessWorker

        from deployments.device_worker import GpuProcessWorker, run_workers

        factories: list[Callable[[], ProcessWorker]] = [
            partial(GpuProcessWorker, GPU_POOL, name, environment, _lock_file(f"{name}.run"))
            for name, environment in devices.items()
        ]
        if choice.runs:
            factories.append(
                lambda: ProcessWorker(
                    RUNS_POOL, name=names[-1], limit=choice.runs, create_pool_if_not_found=False
                )
            )
        try:
            asyncio.run(run_workers(factories))
        finally:
            for name in names:
                crash_orphaned_runs(name)


def worker_names(choice: WorkerChoice) -> list[str]:
    """Names of the workers, the one for whole runs last; raises as `device_environments`."""
    return [*device_environments(choice), *([f"{_host()}-runs"] if choice.runs else [])]


def device_environments(choice: WorkerChoice) -> dict[str, dict[str, str]]:
    """Per worker name, the variables that show a run one device and give it its share of the CPU threads.

    Raises:
        UsageError: the choice is invalid.
        DeviceError: a requested GPU does not exist.
    """
    slots = _device_slots(choice)
    threads = str(max(1, available_threads() // len(slots)))
    return {
        f"{_host()}-{name}": {"CUDA_VISIBLE_DEVICES": visible, "VIRNUC_THREADS": threads}
        for name, visible in slots.items()
    }


def worker_environment() -> Mapping[str, str]:
    """Environment variables that workers and their runs need on top of this process's."""
    inherited = child_environment()
    return {
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}",
        "PREFECT_WORKER_QUERY_SECONDS": inherited.get("PREFECT_WORKER_QUERY_SECONDS", str(QUERY_SECONDS)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
    }


@contextmanager
def reserving_names(names: Sequence[str]) -> Iterator[None]:
    """Reserves names on this host, else UsageError: the server could not tell runs of equally named workers apart."""
    with ExitStack() as locks:
        for name in names:
            complaint = (
                f"a worker {name} is at work on this host already: end it first, or give other --devices, and "
                "--runs 0 for a second command on one host."
            )
            locks.enter_context(only_one(_lock_file(name), complaint))
        yield


def _lock_file(name: str) -> Path:
    return env().home.resolve() / "workers" / f"{name}.lock"


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _device_slots(choice: WorkerChoice) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for each device, by the device's short name."""
    if choice.runs < 0 or (choice.workers is not None and choice.workers < 1):
        raise UsageError("--workers is a number from 1 on, and --runs one from 0 on.")
    gpus = [] if choice.devices == "cpu" else _visible_gpus()
    if choice.devices == "cpu" or (choice.devices == "auto" and not gpus):
        return {f"cpu{number}": "" for number in range(choice.workers or 1)}
    if choice.workers is not None:
        raise UsageError(
            "--workers is for hosts without GPUs: each GPU has one worker. Leave it out, or give --devices cpu."
        )
    if choice.devices == "auto":
        return {f"gpu{gpu}": gpu for gpu in gpus}
    indices = [part.strip() for part in choice.devices.split(",")]
    if not all(index.isascii() and index.isdigit() for index in indices) or len(set(indices)) < len(indices):
        raise UsageError(
            f"--devices {choice.devices} is not understood: give auto, cpu, or GPU indices such as 0,1, each once."
        )
    if missing := [index for index in indices if int(index) >= len(gpus)]:
        available = f"0 to {len(gpus) - 1}" if gpus else "none"
        raise DeviceError(
            f"GPU {', '.join(missing)} is not available on this host (indices that are: {available}): choose another one, "
            "or --devices cpu."
        )
    return {f"gpu{gpus[int(index)]}": gpus[int(index)] for index in indices}


def _visible_gpus() -> Sequence[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    visible = env().cuda_visible_devices
    return [row[0] for row in query_gpus(["index"], units=False)] if visible is None else visible
