"""`virnuc server up`: Prefect server, MLflow, deployments and workers on this machine, on loopback."""

import asyncio
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from asyncio import TaskGroup
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import httpx

from deployments.gate import HOST
from deployments.processes import Program, interruptible, keep_running, only_one
from deployments.server import workers_since
from deployments.worker import (
    HostPlan,
    WorkerChoice,
    leave_working_folder,
    on_cpu_without_gpus,
    plan_host,
    reserving,
)
from virnuc_core import env_config
from virnuc_core.env_config import value_of
from virnuc_core.errors import UsageError
from virnuc_core.files import make_private, write_private

# Restarts of a server in a row; after that, the end of its log helps more than another try.
_MAX_RESTARTS: Final = 3
_POLL_SECONDS: Final = 0.2
_USER: Final = "virnuc"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """What to start; `folder` is for logs."""

    port: int
    mlflow_port: int
    workers: WorkerChoice
    folder: Path

    @property
    def prefect_address(self) -> str:
        """URL of the Prefect UI."""
        return f"http://{HOST}:{self.port}"

    @property
    def access(self) -> Path:
        """Script with the addresses and the password for a shell."""
        return self.folder / "access.sh"

    @property
    def mlflow_address(self) -> str:
        """URL of the MLflow UI."""
        return f"http://{HOST}:{self.mlflow_port}"


def run_stack(stack: Stack) -> None:
    """Starts everything, prints the addresses, and keeps it running until SIGINT or SIGTERM.

    Raises:
        KeyboardInterrupt: the signal; everything has ended.
        UsageError: a port is in use, or this home folder already has a running stack.
        VirnucError: a server does not start or died too often; the message has the end of its log.
    """
    complaint = (
        f"`virnuc server up` runs already with the home folder {stack.folder.parent}: use that one, or set VIRNUC_HOME to "
        "another folder."
    )
    with only_one(stack.folder / "lock", complaint):
        for option, port in (("--port", stack.port), ("--mlflow-port", stack.mlflow_port)):
            _require_free(option, port)
        stack = replace(stack, workers=on_cpu_without_gpus(stack.workers))
        plan = plan_host(stack.workers)
        with reserving(plan):
            pass  # refused now rather than by the worker, again and again
        for log in stack.folder.glob("*.log"):
            log.unlink()
        # From here on this process and all that it starts use these servers, and no settings file of the working folder.
        leave_working_folder()
        access = _access(stack)
        os.environ.update(access)
        env_config.reload()
        make_private(stack.folder.parent / "mlflow.db")
        write_private(
            stack.access, "".join(f"export {name}={shlex.quote(text)}\n" for name, text in access.items())
        )
        with interruptible():
            try:
                asyncio.run(_run_programs(stack, plan))
            except ExceptionGroup as group:  # a program has failed, and the others have ended
                raise group.exceptions[0] from None


async def _run_programs(stack: Stack, plan: HostPlan) -> None:
    """Runs until cancelled; the worker ends before the servers."""
    started = datetime.now(UTC)
    names = [worker.name for worker in plan.workers]
    async with TaskGroup() as servers:
        servers.create_task(keep_running(_prefect_server(stack)))
        servers.create_task(keep_running(_mlflow_server(stack)))
        await _register()
        async with TaskGroup() as workers:
            workers.create_task(keep_running(_worker(stack)))
            while not await asyncio.to_thread(_answers, f"{stack.mlflow_address}/health"):
                await asyncio.sleep(_POLL_SECONDS)
            while not set(names) <= await asyncio.to_thread(workers_since, started):
                await asyncio.sleep(_POLL_SECONDS)
            print(_welcome(stack, plan), flush=True)


async def _register() -> None:
    """In a process of its own: the imports take seconds while the server starts, and memory for as long as it lives."""
    with get_context("spawn").Pool(1, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as process:
        registered = process.apply_async(_register_here)
        while not registered.ready():
            await asyncio.sleep(_POLL_SECONDS)
        registered.get()


def _register_here() -> None:
    from deployments.register import NightlyChoice, register

    # The first start creates a database, possibly on a slow or busy machine.
    register(NightlyChoice(), wait_timeout=180.0)


def _access(stack: Stack) -> dict[str, str]:
    """Variables of programs that use the servers, with a new password."""
    password = secrets.token_urlsafe()
    return {
        "PREFECT_API_URL": f"{stack.prefect_address}/api",
        "PREFECT_API_AUTH_STRING": f"{_USER}:{password}",
        "MLFLOW_TRACKING_URI": stack.mlflow_address,
        "MLFLOW_TRACKING_USERNAME": _USER,
        "MLFLOW_TRACKING_PASSWORD": password,
    }


def _prefect_server(stack: Stack) -> Program:
    return Program(
        name="Prefect server",
        command=(sys.executable, "-m", "deployments.gate", "prefect", str(stack.port)),
        environment={
            "PREFECT_SERVER_API_AUTH_STRING": value_of("PREFECT_API_AUTH_STRING") or "",
            # The page calls the address of the API, also where it was opened as localhost.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{stack.prefect_address},http://localhost:{stack.port}",
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_METRICS_ENABLED": "true",
        },
        log=stack.folder / "prefect.log",
        max_restarts=_MAX_RESTARTS,
    )


def _mlflow_server(stack: Stack) -> Program:
    """MLflow over the store that runs use without a server, so that all runs are in one place."""
    home = stack.folder.parent
    counters = stack.folder / "mlflow-metrics"
    shutil.rmtree(counters, ignore_errors=True)  # of earlier processes
    # Of the extra `metrics`.
    is_counting = find_spec("prometheus_flask_exporter") is not None
    return Program(
        name="MLflow server",
        command=(sys.executable, "-m", "deployments.gate", "mlflow", str(stack.mlflow_port)),
        environment={
            # As `mlflow server --backend-store-uri --default-artifact-root` sets them. Runs write their files themselves.
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{home / 'mlflow.db'}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": (home / "mlartifacts").as_uri(),
            **({"prometheus_multiproc_dir": str(counters)} if is_counting else {}),
            # Its seven processes for jobs have nothing to do here.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        },
        log=stack.folder / "mlflow.log",
        max_restarts=_MAX_RESTARTS,
    )


def _worker(stack: Stack) -> Program:
    """`virnuc server worker`; its runs survive when it dies."""
    choice = stack.workers
    workers = () if choice.workers is None else ("--workers", str(choice.workers))
    options = ("--devices", choice.devices, *workers, "--runs", str(choice.runs))
    return Program(
        name="worker",
        command=(sys.executable, "-m", "virnuc_cli", "server", "worker", *options),
        environment={},
        log=stack.folder / "worker.log",
        keep_children=True,
    )


def _require_free(option: str, port: int) -> None:
    """Raises UsageError for a port in use now; otherwise only the server's log would say it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"port {port} of {HOST} cannot be used ({error}): end what listens there, or give another {option}."
            ) from error


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def _welcome(stack: Stack, plan: HostPlan) -> str:
    names = ", ".join(worker.name for worker in plan.workers)
    return f"""Prefect   {stack.prefect_address} (sign in with {value_of("PREFECT_API_AUTH_STRING")})
MLflow    {stack.mlflow_address} (user {_USER}, password {value_of("MLFLOW_TRACKING_PASSWORD")})
workers   {names}
logs      {stack.folder}

In another shell:
  . {shlex.quote(str(stack.access))}
  prefect deployment run predict/on-demand --watch \\
    --param inputs='["/data/contigs.fa"]' --param out=/data/run

Ctrl-C ends all of it."""
