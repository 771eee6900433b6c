"""Launching kernels, their registration as operators of torch, and the shared memory of a device."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from virnuc_core.errors import DeviceError

DATACENTER_SHARED_MEMORY: Final = 227 * 1024  # bytes per block on data centre GPUs since Hopper

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LIBRARY: Final = torch.library.Library("virnuc", "DEF")


def operator(function: _Function) -> _Function:
    """Registers a function of new tensors as `torch.ops.virnuc.NAME`, by its annotations.

    `torch.library.custom_op` does the same, but its first call imports torch's compiler, which takes seconds.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return function


def empty_results_of(name: str) -> Callable[[_Function], _Function]:
    """Registers a function that gives an operator's results without values, which torch's compiler asks for."""
    return torch.library.register_fake(f"virnuc::{name}", lib=_LIBRARY)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per block; unlimited on the CPU, in Triton's interpreter."""
    if device.type != "cuda":
        return sys.maxsize
    index = torch.cuda.current_device() if device.index is None else device.index
    return _shared_memory_of(index)


@cache
def _shared_memory_of(index: int) -> int:
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
            "Use --precision fp32, which does without it, or another GPU, and please report this message."
        ) from error


def _current_device() -> str:
    if not torch.cuda.is_available():
        return "the CPU"
    properties = torch.cuda.get_device_properties()
    return f"the GPU {properties.name} (compute capability {properties.major}.{properties.minor})"
