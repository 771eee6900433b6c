"""Workers of a host, what their runs see, and what prevents `virnuc worker` and `virnuc up` from starting."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments.device_worker import GpuProcessWorker
from deployments.processes import only_one
from deployments.worker import (
    WorkerChoice,
    device_environments,
    reserving_names,
    work,
    worker_environment,
    worker_names,
)
from virnuc_cli.main import main
from virnuc_core import env_config
from virnuc_core.errors import DeviceError, UsageError

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname().partition(".")[0]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, VIRNUC_HOME=str(tmp_path))


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    see(monkeypatch, PATH=f"{program.parent}:/usr/bin:/bin")


def see(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env_config.reload()


def visible(choice: WorkerChoice) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each worker's runs."""
    environments = device_environments(choice).items()
    return {name.removeprefix(f"{HOST}-"): values["CUDA_VISIBLE_DEVICES"] for name, values in environments}


def test_one_worker_a_gpu_and_one_for_runs(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_names(WorkerChoice()) == [f"{HOST}-gpu0", f"{HOST}-gpu1", f"{HOST}-runs"]
    assert worker_names(WorkerChoice(devices="1", runs=0)) == [f"{HOST}-gpu1"]
    assert visible(WorkerChoice()) == {"gpu0": "0", "gpu1": "1"}
    assert visible(WorkerChoice(devices="cpu")) == {"cpu0": ""}
    see(monkeypatch, CUDA_VISIBLE_DEVICES="5,MIG-7")
    assert visible(WorkerChoice(devices="1, 0")) == {"gpuMIG-7": "MIG-7", "gpu5": "5"}


def test_workers_on_the_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, VIRNUC_THREADS="7", CUDA_VISIBLE_DEVICES="")
    environments = device_environments(WorkerChoice(workers=3))
    assert environments == {
        f"{HOST}-cpu{number}": {"CUDA_VISIBLE_DEVICES": "", "VIRNUC_THREADS": "2"} for number in range(3)
    }


@pytest.mark.parametrize(("interval", "expected"), [(None, "2"), ("15", "15")])
def test_runs_use_this_python_and_the_users_interval(
    monkeypatch: pytest.MonkeyPatch, interval: str | None, expected: str
) -> None:
    see(monkeypatch, PATH="/usr/bin", **({"PREFECT_WORKER_QUERY_SECONDS": interval} if interval else {}))
    environment = worker_environment()
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["PREFECT_WORKER_QUERY_SECONDS"] == expected


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (WorkerChoice(devices="gpu"), UsageError, "--devices gpu is not understood"),
        (WorkerChoice(devices="0,0"), UsageError, "--devices 0,0 is not understood"),
        (WorkerChoice(workers=2), UsageError, "--workers is for hosts without GPUs"),
        (WorkerChoice(devices="cpu", workers=0), UsageError, "--workers is a number from 1 on"),
        (WorkerChoice(runs=-1), UsageError, "--runs one from 0 on"),
        (WorkerChoice(devices="0,2"), DeviceError, r"GPU 2 is not available .*\(indices that are: 0 to 1\)"),
    ],
)
def test_choices_that_make_no_sense(
    two_gpus: None, choice: WorkerChoice, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        device_environments(choice)


def test_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which it changes
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="PREFECT_API_URL"),
    ):
        work(WorkerChoice(devices="cpu"))


def test_name_is_taken_once_a_host() -> None:
    names = worker_names(WorkerChoice(devices="cpu"))
    with (
        reserving_names(names),
        pytest.raises(UsageError, match="cpu0 is at work on this host"),
        reserving_names(names),
    ):
        pass


def test_runs_of_a_worker_see_its_device_and_take_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/production covers Prefect's part, which starts the process and polls the server."""
    started: list[ProcessJobConfiguration] = []
    asked: list[str] = []

    async def start(self: object, run: object, configuration: ProcessJobConfiguration, _: object) -> object:
        started.append(configuration)
        return ProcessWorkerResult(identifier="1", status_code=0)

    async def ask(self: ProcessWorker) -> list[FlowRun]:
        asked.append(self.name)
        return []

    monkeypatch.setattr(ProcessWorker, "run", start)
    monkeypatch.setattr(ProcessWorker, "get_and_submit_flow_runs", ask)
    lock = tmp_path / "a lock"
    worker = GpuProcessWorker("pool", "host-gpu1", {"CUDA_VISIBLE_DEVICES": "1"}, lock)
    configuration = ProcessJobConfiguration(command="python -m deployments.engine", env={"A": "b"})
    asyncio.run(worker.run(FlowRun(id=uuid4(), flow_id=uuid4()), configuration))
    assert started[0].env == {"A": "b", "CUDA_VISIBLE_DEVICES": "1"}
    assert started[0].command == f"python -m deployments.engine '{lock}'"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(worker.get_and_submit_flow_runs())
        assert asked == []
    asyncio.run(worker.get_and_submit_flow_runs())
    assert asked == ["host-gpu1"]


# A run that waits on stdin and then prints.
ENGINE = """
import runpy, sys
run = runpy.run_module
def run_module(name, **options):
    assert name == "prefect.engine" and len(sys.argv) == 1
    print("begun", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        print("Zeile ä")
runpy.run_module = run_module
sys.argv = ["engine", *sys.argv[1:]]
run("deployments.engine", run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_run_holds_its_lock_and_survives_its_worker(tmp_path: Path, is_read: bool) -> None:
    lock = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(lock)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"begun\n"
        with pytest.raises(UsageError, match="in use"), only_one(lock, "in use"):
            pass
        if is_read:
            out, _ = process.communicate(b"go\n", timeout=60)
            assert out.decode().splitlines() == ["Zeile ä"] * 3
        else:
            process.stdout.close()
            process.stdin.write(b"go\n")
            process.stdin.close()
        assert process.wait(60) == 0
    with only_one(lock, "in use"):
        pass


@pytest.mark.parametrize(("option", "other"), [("--port", "--mlflow-port"), ("--mlflow-port", "--port")])
def test_up_refuses_a_port_in_use(option: str, other: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port, free_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        assert main(["up", option, str(port), other, str(free_port), "--devices", "cpu"]) == 2
    said = capfd.readouterr().err
    assert f"port {port} of 127.0.0.1 cannot be used" in said
    assert f"give another {option}" in said


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        ("up/lock", "runs already with the home folder"),
        (f"workers/{HOST}-cpu0.lock", f"a worker {HOST}-cpu0 is at work on this host already"),
    ],
)
def test_one_stack_a_home_and_one_worker_a_device(
    tmp_path: Path, lock: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with only_one(tmp_path / lock, ""):
        assert main(["up", "--devices", "cpu"]) == 2
    assert message in capfd.readouterr().err


def test_up_refuses_a_port_out_of_range(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "70000", "--devices", "cpu"]) == 2
    assert "port 70000" in capfd.readouterr().err
