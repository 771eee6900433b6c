"""Which errors are of memory, and whose memory it is."""

import pytest
import torch

from virnuc_core.errors import DeviceMemoryError
from virnuc_core.models.memory import empty_pinned, is_out_of_memory

# As torch 2.13, Triton 3.7, cuBLAS and cuDNN word them.
OF_A_DEVICE = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
]
OTHERS = [
    "shapes cannot be multiplied",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "out of resource: shared memory, Required: 164368, Hardware limit: 101376.",
]


@pytest.mark.parametrize("text", OF_A_DEVICE)
def test_a_device_that_is_full_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text), "cuda:0")


@pytest.mark.parametrize("text", OTHERS)
def test_other_failures_are_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text), "cuda:0")


def test_the_memory_of_the_host_is_that_of_the_cpu_only() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value, "cpu")
    assert not is_out_of_memory(caught.value, torch.device("cuda:0"))


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "can't allocate memory: you tried to allocate 4 bytes"]
)
def test_memory_that_cannot_be_pinned_is_of_the_host(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DeviceMemoryError, match="this host could not pin 4 MB") as caught:
        empty_pinned((1000, 1000), torch.float32)
    assert not isinstance(caught.value, RuntimeError)  # for which a batch would be halved


def test_a_lost_device_is_not_a_lack_of_memory_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        empty_pinned((1,), torch.float32)
