"""`virnuc server up`: Prefect server, MLflow, deployments and workers on this machine, on loopback, until a signal."""

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import httpx

from deployments.gate import HOST
from deployments.lost_runs import virnuc_workers
from deployments.processes import Programs, interruptible, only_one
from deployments.worker import WorkerChoice, leave_working_folder, on_cpu_without_gpus, plan_host, reserving
from tasks.server import connect
from virnuc_core import env_config
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.files import make_private, write_private

_PYTHON: Final = (sys.executable, "-P", "-m")


def run_stack(port: int, mlflow_port: int, workers: WorkerChoice, home: Path, site: Path | None) -> None:
    """Starts everything, prints the addresses, and waits for SIGINT or SIGTERM; `site` is that of `deploy`.

    Raises:
        KeyboardInterrupt: the signal; everything has ended.
        UsageError: a port is in use, or this home folder already has a running stack.
        VirnucError: one of the programs has ended, and so have the others; the message has the end of its log.
    """
    folder = home / "up"
    complaint = f"`virnuc server up` is already running with home folder {home}: use it, or set VIRNUC_HOME to another folder."
    with only_one(folder / "lock", complaint):
        for option, number in (("--port", port), ("--mlflow-port", mlflow_port)):
            try:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((HOST, number))
            except (OSError, OverflowError) as error:
                raise UsageError(
                    f"port {number} of {HOST} cannot be used ({error}): stop the program that listens there or give another {option}."
                ) from error
        workers = on_cpu_without_gpus(workers)
        with reserving(plan_host(workers)):
            pass  # refused now rather than in the worker's log
        for log in folder.glob("*.log"):
            log.unlink()
        # From here on this process and all that it starts use these servers, and no settings file of the working folder.
        leave_working_folder()
        password = secrets.token_urlsafe()
        access = {
            "PREFECT_API_URL": f"http://{HOST}:{port}/api",
            "PREFECT_API_AUTH_STRING": f"virnuc:{password}",
            "MLFLOW_TRACKING_URI": f"http://{HOST}:{mlflow_port}",
            "MLFLOW_TRACKING_USERNAME": "virnuc",
            "MLFLOW_TRACKING_PASSWORD": password,
        }
        os.environ.update(access)
        env_config.reload()
        exports = [f"export {name}={shlex.quote(text)}\n" for name, text in access.items()]
        write_private(folder / "access.sh", "".join(exports))
        with interruptible(), Programs(folder) as programs:
            _start_servers(programs, port, mlflow_port, access)
            _deploy_and_work(programs, workers, access, site)
            programs.wait_until(lambda: False)


def _start_servers(programs: Programs, port: int, mlflow_port: int, access: Mapping[str, str]) -> None:
    prefect_settings = {
        "PREFECT_SERVER_API_AUTH_STRING": access["PREFECT_API_AUTH_STRING"],
        # The page calls the address of the API, also where it was opened as localhost.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_METRICS_ENABLED": "true",
    }
    programs.start("prefect", (*_PYTHON, "deployments.gate", "prefect", str(port)), prefect_settings)
    home, counters = programs.folder.parent, programs.folder / "mlflow-metrics"
    shutil.rmtree(counters, ignore_errors=True)  # of earlier processes
    make_private(home / "mlflow.db")
    is_counting = find_spec("prometheus_flask_exporter") is not None  # of the extra `metrics`
    mlflow_settings = {
        # As `mlflow server --backend-store-uri --default-artifact-root` sets them, to the store of runs without a server,
        # so that all runs are in one place. Runs write their files themselves.
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{home / 'mlflow.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": (home / "mlartifacts").as_uri(),
        **({"prometheus_multiproc_dir": str(counters)} if is_counting else {}),
        # Its seven processes for jobs have nothing to do here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    programs.start("mlflow", (*_PYTHON, "deployments.gate", "mlflow", str(mlflow_port)), mlflow_settings)


def _deploy_and_work(
    programs: Programs, workers: WorkerChoice, access: Mapping[str, str], site: Path | None
) -> None:
    prefect, mlflow = access["PREFECT_API_URL"], access["MLFLOW_TRACKING_URI"]
    programs.wait_until(lambda: _answers(f"{prefect}/health"))
    # In a process of its own: what it imports would stay in memory.
    command = (*_PYTHON, "virnuc_cli", "server", "deploy", *map(str, filter(None, [site])))
    deploy = subprocess.run(command, capture_output=True, text=True, check=False)
    if deploy.returncode != 0:
        raise VirnucError(f"the deployments cannot be registered: {deploy.stderr.strip()}")
    names, started = [worker.name for worker in plan_host(workers)], datetime.now(UTC)
    lanes = () if workers.workers is None else ("--workers", str(workers.workers))
    options = ("--devices", workers.devices, *lanes, "--runs", str(workers.runs))
    programs.start("worker", (*_PYTHON, "virnuc_cli", "server", "worker", *options), {})
    programs.wait_until(lambda: _answers(f"{mlflow}/health"))

    def are_at_work() -> bool:
        with connect() as client:
            beats = {worker.name: worker.last_heartbeat_time for worker in virnuc_workers(client)}
        return all((beat := beats.get(name)) is not None and beat >= started for name in names)

    programs.wait_until(are_at_work)
    print(f"""Prefect   {prefect.removesuffix("/api")} (sign in with {access["PREFECT_API_AUTH_STRING"]})
MLflow    {mlflow} (user virnuc, password {access["MLFLOW_TRACKING_PASSWORD"]})
workers   {", ".join(names)}
logs      {programs.folder}

In another shell:
  . {shlex.quote(str(programs.folder / "access.sh"))}
  prefect deployment run predict/on-demand --watch \\
    --param inputs='["/data/contigs.fa"]' --param out=/data/run

Press Ctrl-C to stop everything.""", flush=True)  # fmt: skip


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
