"""The workers of this host: one for its GPUs or its CPU, with a slot for each device, and one for whole runs."""

import asyncio
import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from deployments.processes import interruptible, only_one
from deployments.server import missing_pools, server_failure, server_url
from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from virnuc_core import env_config
from virnuc_core.env_config import available_threads, child_environment, env, home_folder, value_of
from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference.nvidia_smi import query_gpus

# Prefect's default of 10 s would leave a GPU idle before each lane.
QUERY_SECONDS: Final = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerChoice:
    """What this host's workers serve.

    Attributes:
        devices: "auto" for every GPU; GPU indices such as "0,1"; "cpu"; or "none".
        workers: slots on the CPU; None is 1.
        runs: number of concurrent whole runs, 0 for none.
    """

    devices: str = "auto"
    workers: int | None = None
    runs: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSlot:
    """A device that computes one lane at a time.

    Attributes:
        name: such as "gpu0".
        key: of this device alone, among those of all hosts.
        visible: its CUDA_VISIBLE_DEVICES.
    """

    name: str
    key: str
    visible: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """The workers that a choice makes of this host.

    Attributes:
        host_id: host name, and a hash that tells the workers of namesakes, containers and SLURM jobs apart and is the
            same after a restart.
        pool: work pool of the devices.
    """

    host_id: str
    pool: str
    devices: tuple[DeviceSlot, ...]
    runs: int

    @property
    def workers(self) -> dict[str, str]:
        """Name of the worker for each work pool."""
        pools = ([self.pool] if self.devices else []) + ([RUNS_POOL] if self.runs else [])
        return {pool: f"{self.host_id}-{pool.removeprefix('virnuc-')}" for pool in pools}

    def environment(self, slot: DeviceSlot) -> dict[str, str]:
        """Variables that show a job its device alone, and give it its share of the CPU threads."""
        threads = max(1, available_threads() // len(self.devices))
        return {"CUDA_VISIBLE_DEVICES": slot.visible, "VIRNUC_THREADS": str(threads)}


def work(choice: WorkerChoice) -> None:
    """Runs the workers of this host until SIGINT or SIGTERM; their runs end with them.

    Raises:
        KeyboardInterrupt: the signal.
        UsageError: no server is configured, it has no work pools yet, or the choice is invalid.
        DeviceError: there is no GPU, or not the one that was asked for.
    """
    leave_working_folder()
    plan = plan_host(choice)
    # Before Prefect reads its settings; runs inherit it as well.
    os.environ.update(worker_environment())
    url = server_url()
    with interruptible(), reserving(plan):
        if (failure := server_failure()) is not None:
            _log.warning("the Prefect server at %s does not answer (%s); waiting for it", url, failure)
            while server_failure() is not None:
                time.sleep(1)
        if missing := missing_pools():
            raise UsageError(
                f"the Prefect server at {url} has no work pool {' and no '.join(missing)} for processes: make them with "
                "`virnuc server deploy`, or in a cluster start `prefect worker start --type kubernetes`."
            )
        from deployments.device_worker import SlotWorker, run_workers
        from deployments.fitness import Host, Slot
        from deployments.jobs import crash_orphaned_jobs
        from deployments.lost_runs import crash_lost_runs

        host = Host(plan.host_id)
        slots: dict[str, list[Slot]] = {}
        if plan.devices:
            name = plan.workers[plan.pool]
            slots[plan.pool] = [
                Slot(name, device.name, plan.environment(device), _lock_file(f"{device.key}.job"))
                for device in plan.devices
            ]
        if plan.runs:
            name = plan.workers[RUNS_POOL]
            slots[RUNS_POOL] = [
                Slot(name, f"run{number}", {}, _lock_file(f"{name}-{number}.job"))
                for number in range(plan.runs)
            ]
        folders = {pool: _folder() / name for pool, name in plan.workers.items()}
        factories = [
            partial(SlotWorker, pool, name, slots[pool], host, folders[pool])
            for pool, name in plan.workers.items()
        ]
        others = [crash_lost_runs(plan.host_id)] if plan.runs else []
        try:
            asyncio.run(run_workers(factories, *others))
        finally:
            for folder in folders.values():
                crash_orphaned_jobs(folder)


def plan_host(choice: WorkerChoice) -> HostPlan:
    """The slots of this host.

    Raises:
        UsageError: the choice is invalid.
        DeviceError: there is no GPU, or not the one that was asked for.
    """
    if choice.runs < 0 or (choice.workers is not None and choice.workers < 1):
        raise UsageError("--workers is a number from 1 on, and --runs one from 0 on.")
    if choice.workers is not None and choice.devices != "cpu":
        raise UsageError(
            "--workers is for CPUs, and each GPU has one slot: leave it out, or give --devices cpu."
        )
    if choice.devices == "none" and not choice.runs:
        raise UsageError("--devices none with --runs 0 leaves nothing to do: give one of them.")
    gpus = [] if choice.devices in ("cpu", "none") else _chosen_gpus(choice.devices)
    uuids = {row[0]: row[-1] for row in query_gpus(["index", "uuid"], units=False)} if gpus else {}
    keys = [uuids.get(gpu, gpu) for gpu in gpus]
    name = socket.gethostname()
    of_this_host = (name, _machine_id(), str(env().home.resolve()), value_of("SLURM_JOB_ID") or "", *keys)
    digest = hashlib.sha256("\0".join(of_this_host).encode()).hexdigest()[:6]
    host_id = f"{name.partition('.')[0]}-{digest}"
    devices = [
        # An index is of this host alone.
        DeviceSlot(name=f"gpu{gpu}", key=key if key != gpu else f"{host_id}-gpu{gpu}", visible=gpu)
        for gpu, key in zip(gpus, keys, strict=True)
    ]
    if choice.devices == "cpu":
        names = [f"cpu{number}" for number in range(choice.workers or 1)]
        devices = [DeviceSlot(name=name, key=f"{host_id}-{name}", visible="") for name in names]
    pool = CPU_POOL if choice.devices == "cpu" else GPU_POOL
    return HostPlan(host_id=host_id, pool=pool, devices=tuple(devices), runs=choice.runs)


def on_cpu_without_gpus(choice: WorkerChoice) -> WorkerChoice:
    """Makes slots on the CPU of "auto" on a host without GPUs, and logs it."""
    if choice.devices != "auto" or _visible_gpus():
        return choice
    _log.warning("this host shows no GPU: its CPU works, for runs with the setting devices=cpu or auto")
    return replace(choice, devices="cpu")


def worker_environment() -> Mapping[str, str]:
    """Environment variables that workers and their runs need on top of this process's."""
    inherited = child_environment()
    return {
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}",
        "PREFECT_WORKER_QUERY_SECONDS": inherited.get("PREFECT_WORKER_QUERY_SECONDS", str(QUERY_SECONDS)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
    }


def leave_working_folder() -> None:
    """Goes to the home folder: Prefect takes its settings from files of the working folder, which may hold data of others."""
    home = home_folder().resolve()
    os.environ["VIRNUC_HOME"] = str(home)
    env_config.reload()
    os.chdir(home)


@contextmanager
def reserving(plan: HostPlan) -> Iterator[None]:
    """Reserves devices and names on this host, else UsageError: two workers would use a device at once."""
    with ExitStack() as locks:
        for key in (*(device.key for device in plan.devices), *plan.workers.values()):
            complaint = (
                f"a worker is at work for {key} already: end it first, or give other --devices, and --runs 0 for a "
                "second command on one host."
            )
            locks.enter_context(only_one(_lock_file(key), complaint))
        yield


def _folder() -> Path:
    return home_folder("workers").resolve()


def _lock_file(name: str) -> Path:
    return _folder() / f"{name}.lock"


def _machine_id() -> str:
    """The machine's id; of the boot, in a container without one; "" on other systems than Linux."""
    for path in (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")):
        if path.is_file() and (found := path.read_text().strip()):
            return found
    return ""


def _chosen_gpus(devices: str) -> Sequence[str]:
    """CUDA_VISIBLE_DEVICES of each chosen GPU; raises as `plan_host`."""
    gpus = _visible_gpus()
    if devices == "auto" and gpus:
        return gpus
    if devices == "auto":
        raise DeviceError(
            "this host shows no GPU: repair what `nvidia-smi` reports, or give --devices cpu to serve the work pool "
            f"{CPU_POOL}, or --devices none for whole runs alone."
        )
    indices = [part.strip() for part in devices.split(",")]
    if not all(index.isascii() and index.isdigit() for index in indices) or len(set(indices)) < len(indices):
        raise UsageError(
            f"--devices {devices} is not understood: give auto, cpu, none, or GPU indices such as 0,1, each once."
        )
    if missing := [index for index in indices if int(index) >= len(gpus)]:
        available = f"0 to {len(gpus) - 1}" if gpus else "none"
        raise DeviceError(
            f"GPU {', '.join(missing)} is not available on this host (indices that are: {available}): choose another one, "
            "or --devices cpu."
        )
    return [gpus[int(index)] for index in indices]


def _visible_gpus() -> Sequence[str]:
    """Those in CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists; none when it lists none."""
    listed = [row[0] for row in query_gpus(["index"], units=False)]
    visible = env().cuda_visible_devices
    return listed if visible is None or not listed else visible
