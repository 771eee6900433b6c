"""Triton kernels for CUDA devices, each registered as the torch operator `torch.ops.virnuc.NAME`.

The operators are registered where there are Triton and a CUDA device. Which of them a device runs is asked for
each device, since those of one host can differ.
"""

from importlib.util import find_spec
from typing import Final

import torch

_REGISTERED: Final = torch.cuda.is_available() and find_spec("triton") is not None

if _REGISTERED:
    from virnuc_core.models.kernels import attention, pooling, product, rowwise  # noqa: F401


def has_kernels(device: torch.device) -> bool:
    """Whether the device runs the kernels: Ampere (compute capability 8.0) and later do."""
    return _has_capability(device, (8, 0))


def has_product_kernel(device: torch.device) -> bool:
    """Whether the device runs `linear_gelu`, which needs the copy engine (TMA) of Hopper (9.0) and later."""
    return _has_capability(device, (9, 0))


def _has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    return _REGISTERED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
