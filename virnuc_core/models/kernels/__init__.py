"""Triton kernels for CUDA devices, each registered as the torch operator `torch.ops.virnuc.NAME`.

`HAS_KERNELS` says whether they can run here; they are registered only then. `HAS_PRODUCT_KERNEL` is for the
one that needs Hopper or later.
"""

from importlib.util import find_spec
from typing import Final

import torch

HAS_KERNELS: Final = find_spec("triton") is not None and torch.cuda.is_available()
HAS_PRODUCT_KERNEL: Final = HAS_KERNELS and torch.cuda.get_device_capability() >= (9, 0)

if HAS_KERNELS:
    from virnuc_core.models.kernels import attention, pooling, product, rowwise  # noqa: F401
