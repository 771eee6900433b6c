"""The workers of this host: one for each GPU, and one that looks after whole runs."""

import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deployments.processes import Program, Supervisor, only_one
from deployments.server import (
    GPU_POOL,
    RUNS_POOL,
    missing_pools,
    report_lost_runs,
    server_failure,
    server_url,
)
from virnuc_core.env_config import available_threads, child_environment, env
from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference.nvidia_smi import query_gpus

# Prefect's own 10 s would be idle time of a GPU before each lane.
QUERY_SECONDS: Final = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerChoice:
    """What a host works on.

    Attributes:
        devices: "auto" for every GPU, or the CPU where there is none; "cpu"; or indices of GPUs such as "0,1".
        workers: workers on the CPU; None is 1.
        runs: whole runs to look after at once, 0 for none.
    """

    devices: str = "auto"
    workers: int | None = None
    runs: int = 4


def work(choice: WorkerChoice) -> None:
    """Keeps the workers of this host running until a signal ends it.

    Raises:
        KeyboardInterrupt: the signal; the workers have ended.
        UsageError: no server is named, it has no work pools yet, or the choice makes no sense.
        DeviceError: a GPU is asked for that is not there.
    """
    url = server_url()
    programs = worker_programs(choice)
    with keeping_names(programs), Supervisor() as supervisor:
        if (failure := server_failure()) is not None:
            _log.warning("the Prefect server at %s does not answer (%s); waiting for it", url, failure)
            supervisor.wait_until(lambda: server_failure() is None)
        if missing := missing_pools():
            raise UsageError(
                f"the Prefect server at {url} has no work pool {' and no '.join(missing)}: make them with `virnuc deploy`."
            )
        supervisor.start(programs)
        supervisor.wait_until(lambda: False)


def worker_programs(
    choice: WorkerChoice, log: Callable[[str], Path | None] = lambda name: None
) -> list[Program]:
    """The workers of this host.

    Args:
        choice: what is asked for.
        log: where the output of a worker goes, by its name.

    Raises:
        UsageError: the choice makes no sense.
        DeviceError: a GPU is asked for that is not there.
    """
    host = socket.gethostname().partition(".")[0]
    places = _places(choice)
    threads = str(max(1, available_threads() // len(places)))
    programs = [
        Program(
            name=f"{host}-{place}",
            command=_command(GPU_POOL, f"{host}-{place}", 1),
            environment=_environment() | {"CUDA_VISIBLE_DEVICES": visible, "VIRNUC_THREADS": threads},
            log=log(f"{host}-{place}"),
            # A lane that has lost its worker goes on; another one must not get the same GPU meanwhile.
            orphans="await",
            settle=partial(report_lost_runs, f"{host}-{place}"),
        )
        for place, visible in places
    ]
    if choice.runs:
        name = f"{host}-runs"
        programs.append(
            Program(
                name=name,
                command=_command(RUNS_POOL, name, choice.runs),
                environment=_environment(),
                log=log(name),
                orphans="leave",
                settle=partial(report_lost_runs, name),
            )
        )
    return programs


@contextmanager
def keeping_names(workers: Sequence[Program]) -> Iterator[None]:
    """Keeps other workers of the same names from this host: the server could not tell their runs apart.

    Raises:
        UsageError: there is one.
    """
    with ExitStack() as names:
        for worker in workers:
            complaint = (
                f"a worker {worker.name} is at work on this host already: end it first, or give other --devices, and "
                "--runs 0 for a second command on one host."
            )
            names.enter_context(only_one(env().home / "workers" / f"{worker.name}.lock", complaint))
        yield


def _places(choice: WorkerChoice) -> list[tuple[str, str]]:
    """Where lanes compute: a short name, and what CUDA may see there."""
    if choice.runs < 0 or (choice.workers is not None and choice.workers < 1):
        raise UsageError("--workers is a number from 1 on, and --runs one from 0 on.")
    gpus = [] if choice.devices == "cpu" else _visible_gpus()
    if choice.devices == "cpu" or (choice.devices == "auto" and not gpus):
        return [(f"cpu{number}", "") for number in range(choice.workers or 1)]
    if choice.workers is not None:
        raise UsageError(
            "--workers is for hosts without GPUs: each GPU has one worker. Leave it out, or give --devices cpu."
        )
    if choice.devices == "auto":
        return [(f"gpu{gpu}", gpu) for gpu in gpus]
    indices = [part.strip() for part in choice.devices.split(",")]
    if not all(index.isascii() and index.isdigit() for index in indices) or len(set(indices)) < len(indices):
        raise UsageError(
            f"--devices {choice.devices} is not understood: give auto, cpu, or GPU indices such as 0,1, each once."
        )
    if missing := [index for index in indices if int(index) >= len(gpus)]:
        there = f"0 to {len(gpus) - 1}" if gpus else "none"
        raise DeviceError(
            f"GPU {', '.join(missing)} is not available on this host (indices that are: {there}): choose another one, or "
            "--devices cpu."
        )
    return [(f"gpu{gpus[int(index)]}", gpus[int(index)]) for index in indices]


def _visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES allows, or every GPU that nvidia-smi tells of."""
    visible = env().cuda_visible_devices
    return tuple(row[0] for row in query_gpus(["index"], units=False)) if visible is None else visible


def _command(pool: str, name: str, limit: int) -> tuple[str, ...]:
    worker = (
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--type",
        "process",
        "--install-policy",
        "never",
    )
    return (*worker, "--pool", pool, "--name", name, "--limit", str(limit))


def _environment() -> dict[str, str]:
    """What workers need beside the environment of this process; the runs that they start inherit it."""
    inherited = child_environment()
    own_python = str(Path(sys.executable).parent)
    return {
        "PATH": f"{own_python}:{inherited.get('PATH', '')}",
        "PREFECT_API_URL": server_url(),
        "PREFECT_WORKER_QUERY_SECONDS": inherited.get("PREFECT_WORKER_QUERY_SECONDS", str(QUERY_SECONDS)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
    }
