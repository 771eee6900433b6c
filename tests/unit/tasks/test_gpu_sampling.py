import os
import time
from pathlib import Path

import pytest

from tasks.lanes import sampling_gpu
from virnuc_core import env_config
from virnuc_core.inference.events import GpuSample

GPUS = "0, GPU-0aaa, 10, 100\n1, GPU-1bbb, 37, 2048\n2, GPU-2ccc, [N/A], 5\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    (tmp_path / "gpus").write_text(GPUS)
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\ncat {tmp_path}/gpus\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def samples_of(device: str, at_least: int = 1, patience: float = 10.0) -> list[GpuSample]:
    heard: list[GpuSample] = []
    with sampling_gpu(device, 3, heard.append, every=0.01):
        deadline = time.monotonic() + patience
        while len(heard) < at_least and time.monotonic() < deadline:
            time.sleep(0.01)
    return heard


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "cuda:1"), ("1", "cuda:0"), ("2,GPU-1b", "cuda:1"), ("GPU-1bbb", "cuda:0")]
)
def test_gpu_of_the_lane_is_sampled(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env_config.reload()
    heard = samples_of(device, at_least=2)
    assert len(heard) >= 2
    assert set(heard) == {GpuSample(lane=3, utilization=0.37, memory_bytes=2048 * 2**20)}


@pytest.mark.parametrize("visible", ["2", "9", "MIG-77"])
def test_gpu_that_is_not_told_of_is_asked_for_once(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env_config.reload()
    assert samples_of("cuda:0", patience=0.5) == []
    assert (nvidia_smi / "asked").read_text() == "asked\n"


def test_cpu_is_not_sampled(nvidia_smi: Path) -> None:
    assert samples_of("cpu", patience=0.1) == []
    assert not (nvidia_smi / "asked").exists()


def test_short_lane_is_not_held_up(nvidia_smi: Path) -> None:
    begin = time.monotonic()
    with sampling_gpu("cuda:0", 0, print, every=60.0):
        pass
    assert time.monotonic() - begin < 5
