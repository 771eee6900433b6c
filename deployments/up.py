"""Everything on this machine, on loopback, with one command: Prefect's server, MLflow, deployments and workers."""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import httpx

from deployments.processes import Program, Supervisor, only_one
from deployments.register import NightlyChoice, register
from deployments.server import workers_since
from deployments.worker import WorkerChoice, keeping_names, worker_programs
from virnuc_core import env_config
from virnuc_core.env_config import env
from virnuc_core.errors import UsageError

HOST: Final = "127.0.0.1"
# The first start makes a database, on a machine that may be slow or busy.
_SECONDS_TO_START: Final = 180.0
# Deaths of a server in a row that are too many: what it says at its end is of more use than a fourth try.
_MOST_DEATHS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """What to start, and where.

    Attributes:
        port: of the Prefect server.
        mlflow_port: of the MLflow server.
        workers: the workers.
        folder: for logs.
    """

    port: int
    mlflow_port: int
    workers: WorkerChoice
    folder: Path

    @property
    def prefect_address(self) -> str:
        """Where a browser finds Prefect."""
        return f"http://{HOST}:{self.port}"

    @property
    def mlflow_address(self) -> str:
        """Where a browser finds MLflow."""
        return f"http://{HOST}:{self.mlflow_port}"

    def log(self, name: str) -> Path:
        """Where a program's output goes."""
        return self.folder / f"{name}.log"


def run_stack(stack: Stack) -> None:
    """Starts everything, says where it is, and keeps it running until a signal ends it.

    Raises:
        KeyboardInterrupt: the signal; everything has ended.
        UsageError: a port is in use, or this home folder has a stack already.
        VirnucError: a server does not start, or died too often; the end of its log says why.
    """
    complaint = (
        f"`virnuc up` runs already with the home folder {stack.folder.parent}: use that one, or set VIRNUC_HOME to "
        "another folder."
    )
    with only_one(stack.folder / "lock", complaint):
        for option, port in (("--port", stack.port), ("--mlflow-port", stack.mlflow_port)):
            _require_free(option, port)
        for log in stack.folder.glob("*.log"):
            log.unlink()
        # From here on this process and all that it starts use these servers.
        os.environ.update(
            {"PREFECT_API_URL": f"{stack.prefect_address}/api", "MLFLOW_TRACKING_URI": stack.mlflow_address}
        )
        env_config.reload()
        started = datetime.now(UTC)
        workers = worker_programs(stack.workers, stack.log)
        names = {worker.name for worker in workers}
        with keeping_names(workers), Supervisor() as supervisor:
            supervisor.start([_prefect_server(stack), _mlflow_server(stack)])
            _register(supervisor)
            supervisor.start(workers)
            supervisor.wait_until(lambda: _answers(f"{stack.mlflow_address}/health"))
            supervisor.wait_until(lambda: names <= workers_since(started))
            print(_welcome(stack, sorted(names)), flush=True)
            supervisor.wait_until(lambda: False)


def _register(supervisor: Supervisor) -> None:
    """Makes the deployments, in a process of its own: it imports what no supervisor needs, while the server starts."""
    with get_context("spawn").Pool(1, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as process:
        registered = process.apply_async(register, (NightlyChoice(),), {"patience": _SECONDS_TO_START})
        supervisor.wait_until(registered.ready)
        registered.get()


def _prefect_server(stack: Stack) -> Program:
    start = ("server", "start", "--host", HOST, "--port", str(stack.port))
    return Program(
        name="Prefect server",
        command=(sys.executable, "-m", "prefect", *start),
        environment={"PREFECT_SERVER_LOGGING_LEVEL": "WARNING", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
        log=stack.log("prefect"),
        most_deaths=_MOST_DEATHS,
    )


def _mlflow_server(stack: Stack) -> Program:
    """MLflow over the same store that runs use when no server is named, so that all runs are in one place."""
    home = env().home.resolve()
    where = ("--host", HOST, "--port", str(stack.mlflow_port), "--workers", "1")
    store = ("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}")
    # Everything is on this machine: runs write their files themselves, as they do without a server.
    files = ("--no-serve-artifacts", "--default-artifact-root", (home / "mlartifacts").as_uri())
    return Program(
        name="MLflow server",
        command=(sys.executable, "-m", "mlflow", "server", *where, *store, *files),
        # Its seven processes for jobs have nothing to do here.
        environment={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        log=stack.log("mlflow"),
        most_deaths=_MOST_DEATHS,
    )


def _require_free(option: str, port: int) -> None:
    """Finds out at once what the server would say in its log.

    Raises:
        UsageError: the port cannot be used.
    """
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


def _welcome(stack: Stack, workers: list[str]) -> str:
    return f"""Prefect   {stack.prefect_address}
MLflow    {stack.mlflow_address}
workers   {", ".join(workers)}
logs      {stack.folder}

In another shell:
  export PREFECT_API_URL={stack.prefect_address}/api
  prefect deployment run predict/on-demand --watch \\
    --param inputs='["/data/contigs.fa"]' --param out=/data/run

Ctrl-C ends all of it."""
