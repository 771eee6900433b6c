"""Out-of-memory errors of torch and the libraries under it, on a device and on the host."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.errors import DeviceMemoryError

_HOST_TEXT = "can't allocate memory"


def is_out_of_memory(error: RuntimeError, device: torch.device | str) -> bool:
    """Whether it is `device` that ran out of memory, so that a smaller batch may fit."""
    if _HOST_TEXT in str(error):
        return torch.device(device).type == "cpu"
    # torch.OutOfMemoryError is not raised by the driver, when Triton loads a kernel, and when cuBLAS and cuDNN create a handle
    # or a workspace, which they report as not being initialized.
    texts = r"out of memory|CU(BLAS|DNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_DEVICE_ALLOC)"
    return isinstance(error, torch.OutOfMemoryError) or re.search(texts, str(error)) is not None


@contextmanager
def raise_on_oom(
    what: str,
    device: torch.device | str,
    advice: str = "use smaller shards (--shard-seconds) or a smaller model",
) -> Iterator[None]:
    """Reports what the memory was needed for, where a smaller batch would not help.

    Raises:
        DeviceMemoryError: the block ran out of memory, on the device or on the host.
    """
    try:
        yield
    except RuntimeError as error:
        if _HOST_TEXT in str(error):
            device = "this host"
        elif not is_out_of_memory(error, device):
            raise
        raise DeviceMemoryError(
            f"{device} has too little memory for {what}: {advice}, or a device with more memory."
        ) from error


def empty_pinned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pinned host memory.

    Raises:
        DeviceMemoryError: the host cannot pin more memory; CUDA's "out of memory" does not say whose it is.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        if not (is_out_of_memory(error, "cpu") or is_out_of_memory(error, "cuda")):
            raise
        size = torch.Size(shape).numel() * dtype.itemsize
        raise DeviceMemoryError(
            f"cannot pin {size / 1e6:.0f} MB of host memory for GPU transfers: close other programs, use smaller shards "
            "(--shard-seconds), or raise the memory limit of the container or job."
        ) from error


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """A small array on a device; does not wait for the copy, which pageable memory would make it do."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return empty_pinned(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the CPU on a device, contiguous there; as it is, if that is the CPU.

    All threads read a memory-mapped file into pinned memory while the device copies; CUDA would read it with one thread.
    Pinned memory is reused, and never more than the tensor.
    """
    if torch.device(device).type == "cpu":
        return tensor
    uploaded = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # 16 MB are enough for several threads to read a memory-mapped file side by side.
    num_elements = (1 << 24) // tensor.itemsize
    pieces = zip(tensor.flatten().split(num_elements), uploaded.view(-1).split(num_elements), strict=True)
    for piece, target in pieces:
        target.copy_(empty_pinned(piece.shape, piece.dtype).copy_(piece), non_blocking=True)
    torch.cuda.current_stream(uploaded.device).synchronize()
    return uploaded
