"""Which workers a host gets, and what each of them sees."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.processes import Program
from deployments.worker import WorkerChoice, keeping_names, worker_programs
from virnuc_core import env_config
from virnuc_core.errors import DeviceError, UsageError

HOST = socket.gethostname().partition(".")[0]
URL = "http://127.0.0.1:4200/api"


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: URL}):
        yield


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi tells of two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env_config.reload()


def see(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env_config.reload()


def names(programs: list[Program]) -> list[str]:
    return [program.name.removeprefix(f"{HOST}-") for program in programs]


def visible(programs: list[Program]) -> list[str | None]:
    return [program.environment.get("CUDA_VISIBLE_DEVICES") for program in programs]


def test_one_worker_a_gpu_and_one_for_runs(two_gpus: None) -> None:
    programs = worker_programs(WorkerChoice())
    assert names(programs) == ["gpu0", "gpu1", "runs"]
    assert visible(programs) == ["0", "1", None]
    assert [program.orphans for program in programs] == ["await", "await", "leave"]
    lane, _, runs = (" ".join(program.command) for program in programs)
    assert (
        f"-m prefect worker start --type process --install-policy never --pool virnuc-gpu --name {HOST}-gpu0 --limit 1"
        in lane
    )
    assert f"--pool virnuc-runs --name {HOST}-runs --limit 4" in runs


def test_chosen_gpus_are_those_that_are_visible(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible(worker_programs(WorkerChoice(devices="1", runs=0))) == ["1"]
    see(monkeypatch, CUDA_VISIBLE_DEVICES="5,MIG-7")
    programs = worker_programs(WorkerChoice(devices="1, 0", runs=0))
    assert names(programs) == ["gpuMIG-7", "gpu5"]
    assert visible(programs) == ["MIG-7", "5"]


def test_workers_on_the_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, VIRNUC_THREADS="7", CUDA_VISIBLE_DEVICES="")
    programs = worker_programs(WorkerChoice(workers=3, runs=2))
    assert names(programs) == ["cpu0", "cpu1", "cpu2", "runs"]
    assert visible(programs)[:3] == ["", "", ""]
    assert [program.environment["VIRNUC_THREADS"] for program in programs[:3]] == ["2", "2", "2"]


def test_gpus_are_left_alone_when_the_cpu_is_asked_for(two_gpus: None) -> None:
    assert names(worker_programs(WorkerChoice(devices="cpu", runs=0))) == ["cpu0"]


def test_runs_are_done_by_this_python_and_at_this_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, PATH="/usr/bin")
    [program] = worker_programs(WorkerChoice(devices="cpu", runs=0), lambda name: tmp_path / name)
    assert program.environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert program.environment["PREFECT_API_URL"] == URL
    assert program.environment["PREFECT_WORKER_QUERY_SECONDS"] == "2"
    assert program.log == tmp_path / f"{HOST}-cpu0"


def test_users_own_interval_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "15")
    [program] = worker_programs(WorkerChoice(devices="cpu", runs=0))
    assert program.environment["PREFECT_WORKER_QUERY_SECONDS"] == "15"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (WorkerChoice(devices="gpu"), "--devices gpu is not understood"),
        (WorkerChoice(devices="0,0"), "--devices 0,0 is not understood"),
        (WorkerChoice(workers=2), "--workers is for hosts without GPUs"),
        (WorkerChoice(devices="cpu", workers=0), "--workers is a number from 1 on"),
        (WorkerChoice(runs=-1), "--runs one from 0 on"),
    ],
)
def test_choices_that_make_no_sense(two_gpus: None, choice: WorkerChoice, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worker_programs(choice)


def test_gpu_that_is_not_there(two_gpus: None) -> None:
    with pytest.raises(
        DeviceError, match=r"GPU 2 is not available on this host \(indices that are: 0 to 1\)"
    ):
        worker_programs(WorkerChoice(devices="0,2"))


def test_no_server_is_named() -> None:
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="PREFECT_API_URL"),
    ):
        worker_programs(WorkerChoice(devices="cpu"))


def test_name_is_taken_once_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, VIRNUC_HOME=str(tmp_path))
    programs = worker_programs(WorkerChoice(devices="cpu"))
    with (
        keeping_names(programs),
        pytest.raises(UsageError, match="cpu0 is at work on this host"),
        keeping_names(programs),
    ):
        pass
