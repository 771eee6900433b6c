"""Launching kernels, and the shared memory of a device."""

import sys
from functools import cache
from typing import Any, Final

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from virnuc_core.errors import DeviceError

DATACENTER_SHARED_MEMORY: Final = 227 * 1024  # bytes per block on data centre GPUs since Hopper


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per block on a device; unlimited on the CPU, in Triton's interpreter."""
    if device.type != "cuda":
        return sys.maxsize
    index = torch.cuda.current_device() if device.index is None else device.index
    limit: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return limit


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Runs a `triton.jit` function over a one-dimensional grid; `options` are Triton's, such as `num_warps`.

    Raises:
        DeviceError: the device lacks resources that the kernel needs.
    """
    try:
        kernel[(programs,)](*arguments, **options)
    except (OutOfResources, PTXASError) as error:
        raise DeviceError(
            f"{_current_device()} cannot run virnuc's kernel {kernel.__name__} (compiled for it: {error}). "
            "Use --precision fp32, which does not need it, or another GPU, and please report this message."
        ) from error


def _current_device() -> str:
    if not torch.cuda.is_available():
        return "the CPU"
    properties = torch.cuda.get_device_properties()
    return f"the GPU {properties.name} (compute capability {properties.major}.{properties.minor})"
