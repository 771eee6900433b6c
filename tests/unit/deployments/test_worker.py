"""Workers of a host, what their runs see, and what prevents `virnuc worker` and `virnuc up` from starting."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
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
    work,
    worker_environment,
    worker_names,
)
from virnuc_cli.main import main
from virnuc_core.errors import DeviceError, UsageError

ROOT = Path(__file__).parents[3]
SetEnv = Callable[..., None]
HOST = socket.gethostname().partition(".")[0]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, set_env: SetEnv) -> None:
    set_env(VIRNUC_HOME=tmp_path)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_env: SetEnv) -> None:
    """A machine whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_env(PATH=f"{program.parent}:/usr/bin:/bin", VIRNUC_THREADS=7)


@pytest.mark.parametrize(
    ("choice", "visible_to_all", "expected", "threads"),
    [
        (WorkerChoice(), None, {"gpu0": "0", "gpu1": "1"}, "3"),
        (WorkerChoice(devices="1", runs=0), None, {"gpu1": "1"}, "7"),
        (WorkerChoice(devices="cpu"), None, {"cpu0": ""}, "7"),
        (WorkerChoice(devices="1, 0"), "5,MIG-7", {"gpuMIG-7": "MIG-7", "gpu5": "5"}, "3"),
        (WorkerChoice(workers=3), "", {"cpu0": "", "cpu1": "", "cpu2": ""}, "2"),
    ],
)
def test_one_worker_a_device_and_one_for_runs(
    two_gpus: None,
    set_env: SetEnv,
    choice: WorkerChoice,
    visible_to_all: str | None,
    expected: dict[str, str],
    threads: str,
) -> None:
    if visible_to_all is not None:
        set_env(CUDA_VISIBLE_DEVICES=visible_to_all)
    assert device_environments(choice) == {
        f"{HOST}-{name}": {"CUDA_VISIBLE_DEVICES": visible, "VIRNUC_THREADS": threads}
        for name, visible in expected.items()
    }
    names = [*expected, "runs"] if choice.runs else [*expected]
    assert worker_names(choice) == [f"{HOST}-{name}" for name in names]


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


def test_runs_use_this_python_and_the_users_interval(set_env: SetEnv) -> None:
    set_env(PATH="/usr/bin")
    assert worker_environment()["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert worker_environment()["PREFECT_WORKER_QUERY_SECONDS"] == "2"
    set_env(PREFECT_WORKER_QUERY_SECONDS=15)
    assert worker_environment()["PREFECT_WORKER_QUERY_SECONDS"] == "15"


def test_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which it changes
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="PREFECT_API_URL"),
    ):
        work(WorkerChoice(devices="cpu"))


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
def test_up_refuses_a_port_that_it_cannot_use(
    option: str, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 70_000):
            assert main(["up", option, str(port), other, "0", "--devices", "cpu"]) == 2
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
