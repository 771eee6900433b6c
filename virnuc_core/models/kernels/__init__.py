"""Triton kernels for CUDA devices; their modules import Triton, so they are imported where `has_kernels` says that they run."""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

MIN_CAPABILITY: Final = (8, 0)  # compute capability of Ampere
_HAS_TRITON: Final = torch.cuda.is_available() and find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether the device runs the kernels, which need Ampere (compute capability 8.0) or later."""
    return _HAS_TRITON and device.type == "cuda" and _capability(device) >= MIN_CAPABILITY


@lru_cache(maxsize=64)  # called several times per layer
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def keep_out_of_graphs() -> None:
    """Has torch's compiler call the kernels as they are, between its graphs."""
    torch.compiler.assume_constant_result(has_kernels)  # it calls the driver, which Dynamo cannot trace
    if _HAS_TRITON:
        for module, name in (("gemm_gelu", "linear_gelu"), ("rowwise", "add_norm")):
            kernels = import_module(f"{__name__}.{module}")
            setattr(kernels, name, torch.compiler.disable(getattr(kernels, name)))
