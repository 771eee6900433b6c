"""Versions, CUDA and devices of the machine that the tests run on, and made-up ones."""

from types import SimpleNamespace

import pytest
import torch

from virnuc_core.doctor import machine
from virnuc_core.env_config import reload


def test_the_machine_of_the_tests_is_described() -> None:
    findings = [*machine.version_findings(), *machine.cuda_findings(), *machine.device_findings()]
    assert {"torch", "prefect", "triton", "cpu"} <= {finding.name for finding in findings}
    assert [finding.summary for finding in findings if finding.state == "problem"] == []
    [cpu] = [finding for finding in findings if finding.name == "cpu"]
    assert "auto: fp32, sdpa attention" in cpu.found


@pytest.mark.parametrize(
    ("built_for", "driver", "visible", "state", "advice"),
    [
        (None, "580.65.06", None, "problem", "this torch is for the CPU alone"),
        ("13.0", "570.10", None, "problem", "CUDA 13.0 needs driver 580 or later"),
        ("13.0", "580.65.06", "7", "problem", "CUDA_VISIBLE_DEVICES is '7'"),
        ("12.8", "570.10", None, "problem", "torch cannot use the GPUs"),
        ("12.8", "570.10", "", "ok", ""),
    ],
)
def test_gpus_that_torch_does_not_see(
    built_for: str | None,
    driver: str,
    visible: str | None,
    state: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reload()
    found = machine._cuda(driver, num_gpus=2, seen=0)
    assert (found.state, found.is_device) == (state, True)
    assert advice in found.advice
    assert bool(found.advice) == (state != "ok")


@pytest.mark.parametrize(
    ("major", "gigabytes", "state", "advice"),
    [
        (9, 140, "ok", ""),
        (7, 16, "warning", "older than compute capability 8.0"),
        (8, 2, "warning", "other programs use its memory"),
    ],
)
def test_a_gpu_is_described(
    major: int, gigabytes: int, state: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(
        name="NVIDIA Made", total_memory=gigabytes * 10**9, major=major, minor=0, uuid="made-up"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    gpu, cpu = machine.device_findings()
    assert (gpu.name, gpu.state, gpu.is_device, cpu.name) == ("cuda:0", state, True, "cpu")
    assert advice in gpu.advice
    assert (
        f"NVIDIA Made, {gigabytes} GB, {gigabytes} GB free, compute capability {major}.0; auto: fp16"
        in gpu.found
    )
