"""Triton kernels for CUDA devices, each registered as the torch operator `torch.ops.virnuc.NAME`.

They are registered if Triton and a CUDA device are present; support is checked per device, since a host can mix them.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Final

import torch

MIN_CAPABILITY: Final = (8, 0)  # compute capability of Ampere
_REGISTERED: Final = torch.cuda.is_available() and find_spec("triton") is not None

if _REGISTERED:
    from virnuc_core.models.kernels import attention, gemm_gelu, rowwise  # noqa: F401


def has_kernels(device: torch.device) -> bool:
    """Whether the device runs the kernels, which need Ampere (compute capability 8.0) or later."""
    return _REGISTERED and device.type == "cuda" and _capability(device) >= MIN_CAPABILITY


@lru_cache(maxsize=64)  # called several times per layer
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
