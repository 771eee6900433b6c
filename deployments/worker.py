"""The workers of this host, which are Prefect's own: one for each GPU or for the CPU, and one for whole runs."""

import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Final

from deployments.lost_runs import crash_lost_runs, crash_runs_of
from deployments.processes import end_program, interruptible, only_one
from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from tasks.server import connect, server_failure, server_url
from virnuc_core import env_config
from virnuc_core.device_record import MAX_FAILURES, count_failures
from virnuc_core.env_config import available_threads, child_environment, env, home_folder, value_of
from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference.nvidia_smi import query_gpus

RESTART_DELAY_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 1.0

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
class StockWorker:
    """A `prefect worker start` of this host.

    Attributes:
        name: of this worker alone, among those of all hosts, and the same after a restart: host name, and a hash that tells
            the workers of namesakes, containers and SLURM jobs apart.
        pool: its work pool.
        limit: runs at once.
        key: of its device, which no other worker of this host may use.
        visible: its CUDA_VISIBLE_DEVICES; None for one without a device.
    """

    name: str
    pool: str
    limit: int = 1
    key: str = ""
    visible: str | None = None


def work(choice: WorkerChoice) -> None:
    """Keeps the workers of this host running until SIGINT or SIGTERM; their runs end with them.

    Raises:
        KeyboardInterrupt: the signal.
        UsageError: no server is configured, it has no work pools yet, or the choice is invalid.
        DeviceError: there is no GPU, or not the one that was asked for, or all of them have failed.
    """
    leave_working_folder()
    workers = plan_host(choice)
    # Before Prefect reads its settings; runs inherit it as well.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{value_of('PATH') or ''}"
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    os.environ.setdefault(
        "PREFECT_WORKER_QUERY_SECONDS", "2"
    )  # its default of 10 s leaves a GPU idle before each lane
    url = server_url()
    with interruptible(), reserving(workers):
        if (failure := server_failure()) is not None:
            _log.warning("the Prefect server at %s does not respond (%s); waiting for it", url, failure)
            while server_failure() is not None:
                time.sleep(1)
        with connect() as client:
            pools = {pool.name for pool in client.read_work_pools() if pool.type == "process"}
        if missing := [name for name in (GPU_POOL, CPU_POOL, RUNS_POOL) if name not in pools]:
            raise UsageError(
                f"the Prefect server at {url} has no work pool {' and no '.join(missing)} of type process: create it with "
                "`virnuc server deploy`, or on Kubernetes run `prefect worker start --type kubernetes`."
            )
        num_devices = sum(worker.visible is not None for worker in workers)
        stopping = Event()
        with ThreadPoolExecutor(len(workers) + 1) as threads:
            try:
                kept = [threads.submit(_keep_running, one, num_devices, stopping) for one in workers]
                if choice.runs:
                    threads.submit(crash_lost_runs, stopping)
                for each in kept:
                    each.result()
            finally:
                stopping.set()
        raise DeviceError(
            f"no worker is left on {socket.gethostname()}: {MAX_FAILURES} lanes in a row failed on every device."
        )


def _keep_running(worker: StockWorker, num_devices: int, stopping: Event) -> None:
    """Starts a worker again whenever it ends, until its device has failed too often."""
    record = _folder() / f"{worker.name}.failures"
    record.unlink(missing_ok=True)
    environment = child_environment()
    if worker.visible is not None:
        threads = max(1, available_threads() // num_devices)
        environment |= {"CUDA_VISIBLE_DEVICES": worker.visible, "VIRNUC_THREADS": str(threads)}
        environment |= {"VIRNUC_DEVICE_RECORD": str(record)}
    own = ("--pool", worker.pool, "--name", worker.name, "--limit", str(worker.limit), "--type", "process")
    command = [sys.executable, "-m", "virnuc_core.with_parent", sys.executable, "-m"]
    command += ["prefect", "worker", "start", *own, "--no-create-pool-if-not-found"]
    crash_runs_of(worker.name)  # of a worker that was killed together with the process that kept it
    while not stopping.is_set():
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        has_failed = False
        while process.poll() is None and not stopping.wait(_POLL_SECONDS) and not has_failed:
            has_failed = (count_failures(record) or 0) >= MAX_FAILURES
        end_program(process)
        crash_runs_of(worker.name)
        if has_failed:
            _log.error(
                "worker %s has stopped: %d lanes in a row failed on its device. Repair the device and restart the worker.",
                worker.name,
                MAX_FAILURES,
            )
            return
        if not stopping.is_set():
            _log.warning("worker %s ended with exit code %d; restarting it", worker.name, process.returncode)
            stopping.wait(RESTART_DELAY_SECONDS)


def plan_host(choice: WorkerChoice) -> list[StockWorker]:
    """The workers that a choice makes of this host.

    Raises:
        UsageError: the choice is invalid.
        DeviceError: there is no GPU, or not the one that was asked for.
    """
    if choice.runs < 0 or (choice.workers is not None and choice.workers < 1):
        raise UsageError("--workers must be at least 1, and --runs at least 0.")
    if choice.workers is not None and choice.devices != "cpu":
        raise UsageError(
            "--workers applies to CPUs only, since each GPU has one slot: omit it or give --devices cpu."
        )
    if choice.devices == "none" and not choice.runs:
        raise UsageError("--devices none with --runs 0 leaves nothing to do: change one of them.")
    gpus = [] if choice.devices in ("cpu", "none") else _chosen_gpus(choice.devices)
    uuids = {row[0]: row[-1] for row in query_gpus(["index", "uuid"])} if gpus else {}
    keys = [uuids.get(gpu, gpu) for gpu in gpus]
    name = socket.gethostname()
    of_this_host = (name, _machine_id(), str(env().home.resolve()), value_of("SLURM_JOB_ID") or "", *keys)
    digest = hashlib.sha256("\0".join(of_this_host).encode()).hexdigest()[:6]
    host_id = f"{name.partition('.')[0]}-{digest}"
    workers = [
        # An index is of this host alone.
        StockWorker(
            name=f"{host_id}-gpu{gpu}",
            pool=GPU_POOL,
            key=key if key != gpu else f"{host_id}-gpu{gpu}",
            visible=gpu,
        )
        for gpu, key in zip(gpus, keys, strict=True)
    ]
    if choice.devices == "cpu":
        names = [f"{host_id}-cpu{number}" for number in range(choice.workers or 1)]
        workers = [StockWorker(name=name, pool=CPU_POOL, key=name, visible="") for name in names]
    if choice.runs:
        name = f"{host_id}-runs"
        workers.append(StockWorker(name=name, pool=RUNS_POOL, limit=choice.runs, key=name))
    return workers


def on_cpu_without_gpus(choice: WorkerChoice) -> WorkerChoice:
    """Makes slots on the CPU of "auto" on a host without GPUs, and logs it."""
    if choice.devices != "auto" or _visible_gpus():
        return choice
    _log.warning("no GPU found on this host: using its CPU, for runs with devices=cpu or auto")
    return replace(choice, devices="cpu")


def leave_working_folder() -> None:
    """Goes to the home folder: Prefect takes its settings from files of the working folder, which may hold data of others."""
    home = home_folder().resolve()
    os.environ["VIRNUC_HOME"] = str(home)
    env_config.reload()
    os.chdir(home)


@contextmanager
def reserving(workers: Iterable[StockWorker]) -> Iterator[None]:
    """Reserves devices and names on this host, else UsageError: two workers would use a device at once."""
    with ExitStack() as locks:
        for worker in workers:
            complaint = (
                f"a worker for {worker.key} is already running: stop it first or give other --devices; a second command on this "
                "host needs --runs 0."
            )
            locks.enter_context(only_one(_folder() / f"{worker.key}.lock", complaint))
        yield


def _folder() -> Path:
    return home_folder("workers").resolve()


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
            "no GPU found on this host: check `nvidia-smi`, give --devices cpu to serve work pool "
            f"{CPU_POOL}, or --devices none for whole runs only."
        )
    indices = [part.strip() for part in devices.split(",")]
    if not all(index.isascii() and index.isdigit() for index in indices) or len(set(indices)) < len(indices):
        raise UsageError(
            f"invalid --devices {devices}: give auto, cpu, none, or GPU indices such as 0,1, each once."
        )
    if missing := [index for index in indices if int(index) >= len(gpus)]:
        available = f"0 to {len(gpus) - 1}" if gpus else "none"
        raise DeviceError(
            f"GPU {', '.join(missing)} is not available on this host (available: {available}): choose another one "
            "or --devices cpu."
        )
    return [gpus[int(index)] for index in indices]


def _visible_gpus() -> Sequence[str]:
    """Those in CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists; none when it lists none."""
    listed = [row[0] for row in query_gpus(["index"])]
    visible = env().cuda_visible_devices
    return listed if visible is None or not listed else visible
