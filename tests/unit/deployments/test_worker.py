"""Workers of a host, what their runs see, and what prevents `virnuc server worker` and `virnuc server up` from starting."""

import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from deployments import worker
from deployments.processes import only_one
from deployments.worker import (
    CPU_POOL,
    GPU_POOL,
    RUNS_POOL,
    StockWorker,
    WorkerChoice,
    on_cpu_without_gpus,
    plan_host,
    reserving,
)
from tests.end_to_end.conftest import wait_until
from virnuc_cli.main import main
from virnuc_core.device_record import recording_device
from virnuc_core.errors import DeviceError, DeviceLostError, UsageError

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
    ("choice", "visible_to_all", "expected"),
    [
        (WorkerChoice(), None, {"gpu0": "0", "gpu1": "1", "runs": None}),
        (WorkerChoice(devices="1", runs=0), None, {"gpu1": "1"}),
        (WorkerChoice(devices="1, 0"), "5,MIG-7", {"gpuMIG-7": "MIG-7", "gpu5": "5", "runs": None}),
        (WorkerChoice(devices="cpu", workers=2, runs=1), "", {"cpu0": "", "cpu1": "", "runs": None}),
        (WorkerChoice(devices="none", runs=1), None, {"runs": None}),
    ],
)
def test_a_worker_for_each_device_and_one_for_whole_runs(
    two_gpus: Path,
    set_env: SetEnv,
    choice: WorkerChoice,
    visible_to_all: str | None,
    expected: dict[str, str | None],
) -> None:
    if visible_to_all is not None:
        set_env(CUDA_VISIBLE_DEVICES=visible_to_all)
    workers = plan_host(choice)
    digest = workers[0].name.removeprefix(f"{HOST}-").partition("-")[0]
    assert len(digest) == 6
    pools = {"gpu": GPU_POOL, "cpu": CPU_POOL, "run": RUNS_POOL}
    assert {
        worker.name.removeprefix(f"{HOST}-{digest}-"): (worker.pool, worker.visible, worker.limit)
        for worker in workers
    } == {
        name: (pools[name[:3]], visible, choice.runs if name == "runs" else 1)
        for name, visible in expected.items()
    }


# Stands in for `prefect worker start`: it writes its environment and arguments, and waits.
WORKER = r"""
import json, os, sys, time
with open(os.environ["SEEN"], "a") as seen:
    seen.write(json.dumps([sys.argv, dict(os.environ), os.getpid()]) + "\n")
if os.environ["ENDS"] == "at once":
    sys.exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize("ends", ["at once", "after three failures", "on a signal"])
def test_a_worker_is_started_again_until_its_device_has_failed_too_often(
    tmp_path: Path,
    set_env: SetEnv,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: str,
) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "__init__.py").touch()
    (tmp_path / "prefect" / "__main__.py").write_text(WORKER)
    seen, told, stopping = tmp_path / "seen", list[str](), Event()
    set_env(SEEN=seen, ENDS=ends, PYTHONPATH=f"{tmp_path}:{ROOT}", VIRNUC_THREADS=8)
    monkeypatch.setattr(worker, "crash_runs_of", told.append)
    monkeypatch.setattr(worker, "RESTART_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.05)
    one = StockWorker(name="host-gpu1", pool=GPU_POOL, key="GPU-bb", visible="1")
    keeping = Thread(target=worker._keep_running, args=(one, 2, stopping))
    keeping.start()
    num_starts = 3 if ends == "at once" else 1
    wait_until(lambda: seen.exists() and seen.read_text().count("\n") >= num_starts, 60)
    arguments, environment, pid = json.loads(seen.read_text().splitlines()[-1])
    record = Path(environment["VIRNUC_DEVICE_RECORD"])
    if ends == "after three failures":
        for _ in range(3):
            with suppress(DeviceLostError), recording_device(record):
                raise DeviceLostError("the GPU fell off the bus")
    else:
        stopping.set()
    keeping.join(60)
    assert not keeping.is_alive()
    assert not psutil.pid_exists(pid)
    assert arguments[1:] == [
        *("worker", "start", "--pool", GPU_POOL, "--name", "host-gpu1", "--limit", "1", "--type", "process"),
        "--no-create-pool-if-not-found",
    ]
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["VIRNUC_THREADS"]) == ("1", "4")
    assert set(told) == {"host-gpu1"}
    assert ("3 lanes in a row failed on its device" in caplog.text) == (ends == "after three failures")


def test_identity_is_the_same_after_a_restart_and_tells_namesakes_apart(
    two_gpus: Path, tmp_path: Path, set_env: SetEnv
) -> None:
    def host_id(**choice: Any) -> str:
        return plan_host(WorkerChoice(**choice))[0].name.partition("-gpu")[0]

    both, one = host_id(), host_id(devices="0")
    assert host_id(runs=1) == both
    set_env(SLURM_JOB_ID="17")
    of_job = host_id(devices="0")
    set_env(SLURM_JOB_ID="18", VIRNUC_HOME=tmp_path / "other")
    of_other_job = host_id(devices="0")
    two_gpus.write_text(two_gpus.read_text().replace("GPU-aa", "GPU-cc"))
    assert len({both, one, of_job, of_other_job, host_id(devices="0")}) == 5


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (WorkerChoice(devices="gpu"), UsageError, "invalid --devices gpu"),
        (WorkerChoice(devices="0,0"), UsageError, "invalid --devices 0,0"),
        (WorkerChoice(workers=2), UsageError, "--workers applies to CPUs"),
        (WorkerChoice(devices="cpu", workers=0), UsageError, "--workers must be at least 1"),
        (WorkerChoice(runs=-1), UsageError, "--runs at least 0"),
        (WorkerChoice(devices="none", runs=0), UsageError, "nothing to do"),
        (WorkerChoice(devices="0,2"), DeviceError, r"GPU 2 is not available .*\(available: 0 to 1\)"),
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
    assert "no GPU found" in caplog.text
    assert on_cpu_without_gpus(WorkerChoice(devices="0")) == WorkerChoice(devices="0")


@pytest.mark.parametrize("option", ["--port", "--mlflow-port"])
def test_up_refuses_a_port_that_it_cannot_use(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    other = {"--port": "--mlflow-port", "--mlflow-port": "--port"}[option]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70_000):
            assert main(["server", "up", option, str(port), other, "0", "--devices", "cpu"]) == 2
            said = f"port {port} of 127.0.0.1 cannot be used"
            assert re.search(f"{said}.* give another {option}", capfd.readouterr().err)


def test_one_stack_a_home_and_one_worker_a_device(
    two_gpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with only_one(tmp_path / "up" / "lock", ""):
        assert main(["server", "up", "--devices", "cpu"]) == 2
    assert "is already running with home folder" in capfd.readouterr().err
    with reserving(plan_host(WorkerChoice(devices="cpu", runs=0))):
        assert main(["server", "up", "--devices", "cpu"]) == 2
    assert "-cpu0 is already running: stop it first" in capfd.readouterr().err
    with (
        reserving(plan_host(WorkerChoice(runs=0))),
        pytest.raises(UsageError, match="a worker for GPU-bb is already running"),
        reserving(plan_host(WorkerChoice(devices="1", runs=0))),
    ):
        pass
