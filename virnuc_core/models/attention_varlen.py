"""Attention by the variable-length kernels of torch and of flash-attn-4, for comparison with our own.

Shapes: T tokens, N heads, H head dim.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.models.attention_plain import turned
from virnuc_core.specs import Family
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

_AMPERE: Final = 8  # major compute capability
_INSTEAD: Final = "or leave --attention out."


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """torch.nn.attention.varlen, which has no ALiBi.

    Attributes:
        cu_seqlens: int32 (B + 1,), on the device.
        max_seqlen: tokens of the longest sequence.
        table: rotary table at the T positions.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        from torch.nn.attention.varlen import varlen_attn  # torch has it from 2.10 on

        q, k, v = turned(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.max_seqlen
        output = varlen_attn(q, k, v.contiguous(), bounds, bounds, longest, longest)
        assert isinstance(output, Tensor)  # a tuple only where auxiliary results are asked for
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The kernels of flash-attn-4, which are compiled when they are first called, for each shape of head and dtype.

    Attributes:
        cu_seqlens: int32 (B + 1,), on the device.
        max_seqlen: tokens of the longest sequence.
        table: rotary table at the T positions; None with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        options: dict[str, Any] = {
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), self.cu_seqlens),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), self.max_seqlen),
        }
        if self.slopes is not None:
            from virnuc_core.models.kernels.alibi_score import add_alibi

            options |= {"score_mod": add_alibi, "aux_tensors": [self.slopes]}
        output: Tensor
        output, _ = _flash_attn()(*turned(qkv, self.table), **options)
        return output.flatten(1)


def require_flash_attn(device: torch.device, family: Family, head_dim: int) -> None:
    """Checks that flash-attn-4 is there, can be imported, and can compute a model on `device`.

    Raises:
        UsageError: it is missing, of another version or broken, or has no kernel for heads of `head_dim`.
        DeviceError: `device` cannot run it.
    """
    found = installed_version(FLASH_ATTN)
    if found != FLASH_ATTN_VERSION:
        raise UsageError(
            f"--attention flash-attn needs {FLASH_ATTN} {FLASH_ATTN_VERSION}, and {found or 'none'} is installed: "
            f'pip install "virnuc[gpu]", {_INSTEAD}'
        )
    try:
        _flash_attn()
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"--attention flash-attn: {FLASH_ATTN} {found} cannot be imported ({type(error).__name__}: {error}): "
            f'pip install --force-reinstall "virnuc[gpu]", {_INSTEAD}'
        ) from error
    if head_dim % 8:
        raise UsageError(
            f"--attention flash-attn computes heads of a multiple of 8, not of {head_dim}: use sdpa, {_INSTEAD}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < _AMPERE:
        raise DeviceError(
            f"--attention flash-attn needs a GPU of compute capability 8.0 or later, and this one has {major}.{minor}: "
            f"use sdpa, {_INSTEAD}"
        )
    if major == _AMPERE and family == "dnabert_s":
        raise DeviceError(
            f"--attention flash-attn has no ALiBi, which DNABERT-S needs, on GPUs of compute capability {major}.{minor}: "
            f"use triton, {_INSTEAD}"
        )


@cache
def _flash_attn() -> Callable[..., Any]:
    """The entry to flash-attn-4, which is optional and so imported only where it was chosen."""
    from flash_attn.cute import flash_attn_varlen_func

    # Its compiler warns of an argument of its own, which has no effect on what is compiled.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    function: Callable[..., Any] = flash_attn_varlen_func
    return function
