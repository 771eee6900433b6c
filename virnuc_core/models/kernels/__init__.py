"""Triton kernels for CUDA devices, each registered as the torch operator `torch.ops.virnuc.NAME`.

`HAS_KERNELS` says whether they can run here, on Ampere or later; they are registered only then.
`HAS_PRODUCT_KERNEL` is for the one that needs Hopper or later.
"""

from importlib.util import find_spec
from typing import Final

import torch

_CAPABILITY: Final = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

HAS_KERNELS: Final = find_spec("triton") is not None and _CAPABILITY >= (8, 0)
HAS_PRODUCT_KERNEL: Final = HAS_KERNELS and _CAPABILITY >= (9, 0)

if HAS_KERNELS:
    from virnuc_core.models.kernels import attention, pooling, product, rowwise  # noqa: F401
