"""Choice of device, arithmetic and batch size; recognizing out-of-memory errors, and of which memory."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from virnuc_core.errors import DeviceError, DeviceMemoryError, UsageError
from virnuc_core.inference import device
from virnuc_core.inference.device import (
    cpu_has_bf16,
    default_token_budget,
    fitting_token_budget,
    resolve_devices,
    resolve_precision,
    weight_bytes,
)
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.memory import empty_pinned, is_out_of_memory, raise_on_oom
from virnuc_core.specs import ModelSpec

GB = 10**9


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu() -> None:
    assert resolve_devices(("auto",)) == resolve_devices(("cpu",)) == ("cpu",)
    with pytest.raises(DeviceError, match=r"GPU 0 is not available .* --devices cpu"):
        resolve_devices(("0",))


@pytest.mark.parametrize("choice", [("gpu",), ("cpu", "0"), ("auto", "1"), (), ("-1",), ("",)])
def test_what_is_no_device_is_refused(choice: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="not understood"):
        resolve_devices(choice)
    with pytest.raises(UsageError, match="twice"):
        resolve_devices(("1", "0", "1"))


def test_precision() -> None:
    assert resolve_precision("auto", "cuda:0") == "fp16"
    assert resolve_precision("auto", "cpu") == resolve_precision("fp32", "cpu") == "fp32"
    for precision in ("fp16", "fp8"):
        with pytest.raises(DeviceError, match=f"does not compute in {precision}"):
            resolve_precision(precision, "cpu")
    if cpu_has_bf16():
        assert resolve_precision("bf16", "cpu") == "bf16"
    else:
        with pytest.raises(DeviceError, match="no bf16 instructions"):
            resolve_precision("bf16", "cpu")


def spec(width: int, num_layers: int = 6) -> ModelSpec:
    [entry] = find_entries("650M", "esm2")
    return replace(entry.spec, num_layers=num_layers, embedding_dim=width, ffn_dim=4 * width)


def test_wide_models_need_fewer_tokens_on_a_gpu() -> None:
    budgets = [fitting_token_budget(spec(width), "fp16", 140 * GB) for width in (320, 640, 1280, 2560)]
    assert budgets == [131_072, 131_072, 65_536, 65_536]
    assert default_token_budget(spec(320), "fp32", "cpu") < budgets[-1]


def test_a_small_gpu_gets_smaller_batches_and_what_does_not_fit_none() -> None:
    large = spec(2560, 36)
    assert weight_bytes(large, "fp16") == pytest.approx(2 * 2838e6, rel=0.05)
    budgets = [fitting_token_budget(large, "fp16", free * GB) for free in (80, 8, 7, 6)]
    assert budgets[0] == 65_536
    assert budgets == sorted(budgets, reverse=True)
    assert 1024 <= budgets[2] < budgets[1] < 65_536
    assert budgets[2] % 1024 == 0
    assert fitting_token_budget(large, "fp32", 11 * GB) < 1024
    assert fitting_token_budget(large, "fp8", 8 * GB) > budgets[1]


def test_free_memory_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-0a, 100'\necho 'GPU-1b, [N/A]'\necho 'GPU-2c, 300'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device._query_free_memory() == {"GPU-0a": 100 * 2**20, "GPU-2c": 300 * 2**20}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert device._query_free_memory() == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert device._query_free_memory() == {}


@pytest.mark.parametrize(
    "text",  # as torch 2.13, Triton 3.7, cuBLAS and cuDNN word them
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_a_device_that_is_full_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text), "cuda:0")


def refuse_memory(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "empty", refuse)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "out of resource: shared memory, Required: 164368, Hardware limit: 101376.",
    ],
)
def test_other_failures_are_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_out_of_memory(RuntimeError(text), "cuda:0")
    refuse_memory(monkeypatch, text)
    with pytest.raises(RuntimeError, match=text.split()[0]):
        empty_pinned((1,), torch.float32)


def test_the_memory_of_the_host_is_that_of_the_cpu_only() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value, "cpu")
    assert not is_out_of_memory(caught.value, torch.device("cuda:0"))


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "can't allocate memory: you tried to allocate 4 bytes"]
)
def test_memory_that_cannot_be_pinned_is_of_the_host(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    refuse_memory(monkeypatch, text)
    with pytest.raises(DeviceMemoryError, match="this host could not pin 4 MB") as caught:
        empty_pinned((1000, 1000), torch.float32)
    assert not isinstance(caught.value, RuntimeError)  # for which a batch would be halved


def test_what_there_was_no_memory_for_is_named() -> None:
    for error, where, place in (
        (torch.OutOfMemoryError("out of memory"), "cpu", "cpu"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "cuda:0", "this host"),
    ):
        message = f"{place} has not enough memory for the vectors"
        with pytest.raises(DeviceMemoryError, match=message), raise_on_oom("the vectors", where):
            raise error
    with pytest.raises(RuntimeError, match="other"), raise_on_oom("the vectors", "cpu"):
        raise RuntimeError("other")
