"""Workers of a host, what their runs see, and what prevents `virnuc server worker` and `virnuc server up` from starting."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.processes import only_one
from deployments.server import CPU_POOL, GPU_POOL, RUNS_POOL
from deployments.worker import (
    WorkerChoice,
    on_cpu_without_gpus,
    plan_host,
    reserving,
    work,
    worker_environment,
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
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_env: SetEnv) -> Path:
    """A machine whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0, GPU-aa\\n1, GPU-bb\\n'\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_env(PATH=f"{program.parent}:/usr/bin:/bin", VIRNUC_THREADS=7)
    return program


@pytest.mark.parametrize(
    ("choice", "visible_to_all", "pool", "expected", "threads"),
    [
        (WorkerChoice(), None, GPU_POOL, {"gpu0": "0", "gpu1": "1"}, "3"),
        (WorkerChoice(devices="1", runs=0), None, GPU_POOL, {"gpu1": "1"}, "7"),
        (WorkerChoice(devices="cpu"), None, CPU_POOL, {"cpu0": ""}, "7"),
        (WorkerChoice(devices="1, 0"), "5,MIG-7", GPU_POOL, {"gpuMIG-7": "MIG-7", "gpu5": "5"}, "3"),
        (WorkerChoice(devices="cpu", workers=3), "", CPU_POOL, {"cpu0": "", "cpu1": "", "cpu2": ""}, "2"),
        (WorkerChoice(devices="none", runs=1), None, None, {}, ""),
    ],
)
def test_a_slot_for_each_device_and_a_pool_for_each_kind(
    two_gpus: Path,
    set_env: SetEnv,
    choice: WorkerChoice,
    visible_to_all: str | None,
    pool: str | None,
    expected: dict[str, str],
    threads: str,
) -> None:
    if visible_to_all is not None:
        set_env(CUDA_VISIBLE_DEVICES=visible_to_all)
    plan = plan_host(choice)
    assert {slot.name: plan.environment(slot) for slot in plan.devices} == {
        name: {"CUDA_VISIBLE_DEVICES": visible, "VIRNUC_THREADS": threads}
        for name, visible in expected.items()
    }
    pools = ([pool] if pool else []) + ([RUNS_POOL] if choice.runs else [])
    names = {each: f"{plan.host_id}-{each.removeprefix('virnuc-')}" for each in pools}
    assert plan.workers == names
    assert plan.host_id.startswith(f"{HOST}-")


def test_identity_is_the_same_after_a_restart_and_tells_namesakes_apart(
    two_gpus: Path, tmp_path: Path, set_env: SetEnv
) -> None:
    both, one = plan_host(WorkerChoice()), plan_host(WorkerChoice(devices="0"))
    assert plan_host(WorkerChoice(runs=1)).host_id == both.host_id
    set_env(SLURM_JOB_ID="17")
    of_job = plan_host(WorkerChoice(devices="0"))
    set_env(SLURM_JOB_ID="18", VIRNUC_HOME=tmp_path / "other")
    of_other_job = plan_host(WorkerChoice(devices="0"))
    two_gpus.write_text(two_gpus.read_text().replace("GPU-aa", "GPU-cc"))
    on_namesake = plan_host(WorkerChoice(devices="0"))
    plans = (both, one, of_job, of_other_job, on_namesake)
    assert len({plan.host_id for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (WorkerChoice(devices="gpu"), UsageError, "--devices gpu is not understood"),
        (WorkerChoice(devices="0,0"), UsageError, "--devices 0,0 is not understood"),
        (WorkerChoice(workers=2), UsageError, "--workers is for CPUs"),
        (WorkerChoice(devices="cpu", workers=0), UsageError, "--workers is a number from 1 on"),
        (WorkerChoice(runs=-1), UsageError, "--runs one from 0 on"),
        (WorkerChoice(devices="none", runs=0), UsageError, "nothing to do"),
        (WorkerChoice(devices="0,2"), DeviceError, r"GPU 2 is not available .*\(indices that are: 0 to 1\)"),
    ],
)
def test_choices_that_make_no_sense(
    two_gpus: Path, choice: WorkerChoice, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_host(choice)


@pytest.mark.parametrize(
    ("script", "visible"), [("exit 9", None), ("exit 9", "0"), ("printf '0, GPU-aa'", "")]
)
@pytest.mark.parametrize("devices", ["auto", "0"])
def test_a_host_that_shows_no_gpu_never_serves_the_gpu_pool(
    two_gpus: Path, set_env: SetEnv, script: str, visible: str | None, devices: str
) -> None:
    two_gpus.write_text(f"#!/bin/sh\n{script}\n")
    if visible is not None:
        set_env(CUDA_VISIBLE_DEVICES=visible)
    with pytest.raises(DeviceError, match="--devices cpu"):
        plan_host(WorkerChoice(devices=devices))


def test_up_works_on_the_cpu_of_a_host_without_gpus(
    two_gpus: Path, set_env: SetEnv, caplog: pytest.LogCaptureFixture
) -> None:
    assert on_cpu_without_gpus(WorkerChoice()) == WorkerChoice()
    set_env(CUDA_VISIBLE_DEVICES="")
    assert on_cpu_without_gpus(WorkerChoice(workers=2)) == WorkerChoice(devices="cpu", workers=2)
    assert "shows no GPU" in caplog.text
    assert on_cpu_without_gpus(WorkerChoice(devices="0")) == WorkerChoice(devices="0")


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
    lock, other = tmp_path / "lock", tmp_path / "other"
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(other), str(lock)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"begun\n"
        for held in (lock, other):
            with pytest.raises(UsageError, match="in use"), only_one(held, "in use"):
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
            assert main(["server", "up", option, str(port), other, "0", "--devices", "cpu"]) == 2
            said = capfd.readouterr().err
            assert f"port {port} of 127.0.0.1 cannot be used" in said
            assert f"give another {option}" in said


def test_one_stack_a_home_and_one_worker_a_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / "up" / "lock", ""):
        assert main(["server", "up", "--devices", "cpu"]) == 2
    assert "runs already with the home folder" in capfd.readouterr().err
    with reserving(plan_host(WorkerChoice(devices="cpu", runs=0))):
        assert main(["server", "up", "--devices", "cpu"]) == 2
    assert "-cpu0 already: end it first" in capfd.readouterr().err


def test_a_gpu_has_one_worker_however_many_are_chosen(two_gpus: Path) -> None:
    with (
        reserving(plan_host(WorkerChoice(runs=0))),
        pytest.raises(UsageError, match="at work for GPU-bb already"),
        reserving(plan_host(WorkerChoice(devices="1", runs=0))),
    ):
        pass
