"""The attention backends: bidirectional, over packed tokens, with rotary angles or ALiBi inside.

    triton      our kernels: 16 bit on CUDA devices
    flash-attn  the flash-attn-4 package, where it is installed: 16 bit on CUDA devices
    varlen      torch's own variable-length kernel: 16 bit on CUDA devices, rotary positions only
    sdpa        torch's scaled_dot_product_attention over rectangles of sequences of similar length
    padded      the same over one rectangle per batch: used with VIRNUC_DISABLE_PACKING
    reference   plain fp32 softmax, one sequence at a time: the oracle for the others

Shapes: B sequences, T tokens, N heads, H head dim. Every backend maps a fused buffer (T, 3, N, H) to (T, N * H).
`cu_seqlens` is int32 (B + 1,) on the device; `table` is the rotary table at the T positions, None with ALiBi; `slopes`
are the ALiBi slopes, fp32 (N,), None with rotary positions.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.models.attention_plain import RectangleAttention, ReferenceAttention, split_qkv
from virnuc_core.models.kernels import has_kernels
from virnuc_core.models.memory import empty_pinned
from virnuc_core.models.positions import alibi_slopes, position_ids, rotary_table
from virnuc_core.specs import AttentionBackend, AttentionChoice, Family, ResolvedPrecision
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

_HALF_PRECISIONS: Final = ("fp16", "bf16", "fp8")
_MAX_HEAD_DIM: Final = 128
_AMPERE: Final = 8  # major compute capability
_INSTEAD: Final = "or leave --attention out."
# Maximum slots per real token. The CPU gains nothing from fewer, larger calls, so it pads nothing; a GPU needs few
# launches.
_MAX_PADDED_SHARE: Final = {"cpu": 1.0, "cuda": 1.25}
_ALIGNMENT: Final = 4  # int32 entries in 16 bytes, the alignment that Triton compiles for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Our kernels; `virnuc_core.models.kernels.attention.packed_attention` documents the attributes."""

    short_tiles: Tensor
    long_tiles: Tensor
    cos_sin: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor, quantize: bool = False) -> Tensor:
        """(T, 3, N, H) -> (T, N * H), in fp8 e4m3 if `quantize`."""
        output: Tensor = torch.ops.virnuc.packed_attention(
            qkv, self.short_tiles, self.long_tiles, self.cos_sin, self.slopes, quantize
        )
        return output


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """torch.nn.attention.varlen, which has no ALiBi."""

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        from torch.nn.attention.varlen import varlen_attn  # torch has it from 2.10 on

        q, k, v = split_qkv(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.max_seqlen
        output = varlen_attn(q, k, v.contiguous(), bounds, bounds, longest, longest)
        assert isinstance(output, Tensor)  # a tuple only where auxiliary results are asked for
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The kernels of flash-attn-4, which are compiled at their first call for each head dim and dtype."""

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
        output, _ = _flash_attn()(*split_qkv(qkv, self.table), **options)
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sequence bounds and attention of one batch on the model's device, built once and shared by all layers."""

    cu_seqlens: Tensor
    attention: Callable[[Tensor], Tensor]

    @classmethod
    def build(
        cls,
        cu_seqlens: npt.NDArray[np.int32],
        *,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        rotary_head_dim: int | None = None,
        alibi_heads: int | None = None,
    ) -> Self:
        """Plans on the host, then copies to `device` without synchronising.

        `cu_seqlens` is int32 (B + 1,), starting at 0; `device` and `dtype` are the model's. `rotary_head_dim` is H of
        a model with rotary positions, `alibi_heads` N of a model with ALiBi.
        """
        slopes = None if alibi_heads is None else _slopes_on(alibi_heads, device)
        if backend == "triton":
            return cls(*_build_triton(cu_seqlens, rotary_head_dim, slopes, device))
        [bounds] = _upload([cu_seqlens], device)
        table = None
        if rotary_head_dim is not None:
            table = rotary_table(rotary_head_dim, position_ids(bounds, int(cu_seqlens[-1])))
        lengths = np.diff(cu_seqlens)
        longest = int(lengths.max(initial=0))
        attention: Callable[[Tensor], Tensor]
        if backend == "reference":
            attention = ReferenceAttention(tuple(lengths.tolist()), table, slopes)
        elif backend == "flash-attn":
            attention = FlashAttention(bounds, longest, table, slopes)
        elif backend == "varlen":
            assert table is not None  # resolve_attention refuses it for ALiBi
            attention = VarlenAttention(bounds, longest, table)
        else:
            share = math.inf if backend == "padded" else _MAX_PADDED_SHARE[device.type]
            attention = RectangleAttention.build(cu_seqlens, table, slopes, device, dtype, share)
        return cls(bounds, attention)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that `stream` uses the layout, which was allocated on another one."""
        for tensor in _tensors(self):
            tensor.record_stream(stream)


def packed_attention(qkv: Tensor, layout: PackedLayout, *, quantize: bool = False) -> Tensor:
    """Attention of every token to all tokens of its own sequence: (T, 3, N, H) -> (T, N * H).

    The result has the dtype of `qkv`, or is fp8 e4m3 with `quantize`; then no value may exceed 448. With rotary
    positions, the columns of queries and keys are in the order of `positions.pair_rows`.
    """
    if isinstance(layout.attention, TritonAttention):
        return layout.attention(qkv, quantize)
    attended = layout.attention(qkv)
    return attended.to(torch.float8_e4m3fn) if quantize else attended


def resolve_attention(
    choice: AttentionChoice,
    device: torch.device | str,
    family: Family,
    precision: ResolvedPrecision,
    head_dim: int,
) -> AttentionBackend:
    """Resolves "auto" to a backend that runs on `device`, and logs it.

    Raises:
        UsageError: the backend cannot do this model or precision, or its package is not installed.
        DeviceError: the device cannot run the backend.
    """
    wants_kernel = choice in ("triton", "flash-attn", "varlen")
    suits = precision in _HALF_PRECISIONS and head_dim <= _MAX_HEAD_DIM and not head_dim % 2
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    if wants_kernel and not on_cuda:
        raise DeviceError(f"--attention {choice} needs a CUDA device: leave it out, or use sdpa.")
    if wants_kernel and not suits:
        raise UsageError(
            f"--attention {choice} computes in fp16 or bf16 with heads of an even width up to {_MAX_HEAD_DIM}, not "
            f"in {precision} with heads of {head_dim}: leave it out, or use sdpa."
        )
    if choice == "triton" and not has_kernels(device):
        raise DeviceError(
            "--attention triton needs Triton and a GPU of compute capability 8.0 or later: leave it out, or use sdpa."
        )
    if choice == "varlen" and family == "dnabert_s":
        raise UsageError("--attention varlen has no ALiBi, which DNABERT-S needs: use auto or triton.")
    if choice == "flash-attn":
        _require_flash_attn(device, family, head_dim)
    backend: AttentionBackend = "sdpa"
    if choice != "auto":
        backend = choice
    elif suits and has_kernels(device):
        backend = "triton"
    _log.info("attention of %s on %s: %s (asked for: %s)", family, device, backend, choice)
    return backend


def _require_flash_attn(device: torch.device, family: Family, head_dim: int) -> None:
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
    from flash_attn.cute import flash_attn_varlen_func

    # Its compiler warns about an argument of its own, which does not affect the compiled code.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def _build_triton(
    cu_seqlens: npt.NDArray[np.int32], head_dim: int | None, slopes: Tensor | None, device: torch.device
) -> tuple[Tensor, TritonAttention]:
    from virnuc_core.models.kernels.attention import BLOCK, padded_head_dim, plan_tiles  # imports triton

    short, long = plan_tiles(cu_seqlens)
    bounds, short_tiles, long_tiles = _upload([cu_seqlens, short, long], device)
    cos_sin = None
    if head_dim is not None:
        longest = int(np.diff(cu_seqlens).max(initial=1))
        # A power of two, so that few tables are ever made.
        num_positions = max(BLOCK, 1 << (longest - 1).bit_length())
        cos_sin = _rotary_table_on(head_dim, padded_head_dim(head_dim), num_positions, device)
    return bounds, TritonAttention(short_tiles, long_tiles, cos_sin, slopes)


def _upload(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copies small int32 arrays in one asynchronous transfer."""
    starts = np.cumsum([0] + [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    allocate = empty_pinned if device.type == "cuda" else torch.empty
    buffer = allocate((int(starts[-1]),), dtype=torch.int32)
    host = buffer.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.size] = array.ravel()
    moved = buffer.to(device, non_blocking=True)
    return [
        moved[start : start + array.size].view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]


@lru_cache(maxsize=16)
def _slopes_on(num_heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(num_heads).to(device)


@lru_cache(maxsize=16)
def _rotary_table_on(head_dim: int, padded: int, num_positions: int, device: torch.device) -> Tensor:
    """The rotary table at positions 0, 1, ..., its rows zero-padded for heads of `padded` columns.

    Computed on the CPU: a GPU would first load a kernel for each function, which takes longer.
    """
    table = rotary_table(head_dim, torch.arange(num_positions))
    return torch.nn.functional.pad(table, (0, 0, 0, (padded - head_dim) // 2)).to(device)


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, tuple):
        return [tensor for member in part for tensor in _tensors(member)]
    if is_dataclass(part):
        return [tensor for field in fields(part) for tensor in _tensors(getattr(part, field.name))]
    return []
