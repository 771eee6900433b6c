"""The SLURM scripts, run by a stand-in for sbatch, with a real Prefect server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

import deployments
from tests.end_to_end.conftest import wait_until
from tests.production.conftest import ON_GPUS, Server, free_port

pytestmark = pytest.mark.slow

SCRIPTS = Path(deployments.__file__).parent / "examples" / "slurm"
DEVICES = () if ON_GPUS else ("--devices", "cpu")
# Begins the tasks of a job at once, each in a process group of its own as SLURM does, and prints their ids.
SBATCH = """#!/bin/bash
set -euo pipefail
tasks=(0)
while [[ $1 == --* ]]; do
  case $1 in
    --array=0-*) tasks=($(seq 0 "${1#--array=0-}")) ;;
  esac
  shift
done
script=$1
shift
for task in "${tasks[@]}"; do
  SLURM_JOB_ID=$((4000 + task)) SLURM_ARRAY_JOB_ID=4000 SLURM_ARRAY_TASK_ID=$task SLURM_CPUS_ON_NODE=1 \\
    setsid bash "$script" "$@" >"$SLURM_LOGS/$task.log" 2>&1 &
  echo $!
done
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a login node with `sbatch` on its PATH and an installation of virnuc."""
    for name in ("logs", "scratch", "bin", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    programs = {
        "bin/sbatch": SBATCH,
        "venv/bin/activate": f"export PATH={tmp_path}/venv/bin:$PATH\n",
        "venv/bin/virnuc": f'#!/bin/sh\nexec {sys.executable} -m virnuc_cli "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    unset = ("PREFECT_", "MLFLOW_", "VIRNUC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return environment | {
        "PATH": f"{tmp_path}/bin:{environment['PATH']}",
        "SLURM_LOGS": f"{tmp_path}/logs",
        "TMPDIR": f"{tmp_path}/scratch",
        "VIRNUC_VENV": f"{tmp_path}/venv",
    }


def sbatch(cluster: dict[str, str], *arguments: object) -> list[int]:
    """Submits a job and returns the process groups of its tasks."""
    done = subprocess.run(
        ["sbatch", *map(str, arguments)], env=cluster, capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def program(environment: dict[str, str], *command: str) -> Iterator[None]:
    """Runs a module during the block."""
    process = subprocess.Popen([sys.executable, "-m", *command], env=environment, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_one_run_in_a_job(cluster: dict[str, str], genomes: Path, tmp_path: Path) -> None:
    [job] = sbatch(cluster, SCRIPTS / "predict.sbatch", genomes, tmp_path / "run", "--preset", "tiny")
    wait_until((tmp_path / "run" / "run.json").exists, 200)
    wait_until(lambda: not is_running(job))
    assert (tmp_path / "scratch" / "virnuc-4000" / "mlflow.db").exists()


@pytest.mark.timeout(900)
def test_workers_as_an_array_of_jobs(cluster: dict[str, str], genomes: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    login = cluster | {"PREFECT_API_URL": url, "VIRNUC_HOME": str(tmp_path / "home")}
    service = login | {"PREFECT_HOME": str(tmp_path / "server"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    start = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    with program(service, *start), SyncPrefectClient(url) as client:
        wait_until(lambda: client.api_healthcheck() is None, 120)
        subprocess.run([sys.executable, "-m", "virnuc_cli", "server", "deploy"], env=login, check=True)
        with program(login, "virnuc_cli", "server", "worker", "--devices", "none", "--runs", "2"):
            jobs = sbatch(
                cluster | {"PREFECT_API_URL": url}, "--array=0-1", SCRIPTS / "worker.sbatch", *DEVICES
            )
            try:
                server = Server(client=client)
                run_id = server.ask(inputs=[str(genomes)], out=str(tmp_path / "run"))
                server.wait_for(run_id, "Completed", 500)
                workers = {run.labels["prefect.worker.name"] for run in server.lanes(run_id)}
            finally:
                for job in jobs:
                    os.kill(job, signal.SIGTERM)  # as --signal=B:TERM does
            wait_until(lambda: not any(map(is_running, jobs)), 60)
    assert len(workers) == len(jobs), "jobs on one node are told apart by their ids"
