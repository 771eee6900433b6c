"""The attention backends: bidirectional, over packed tokens, with rotary angles or ALiBi inside.

    triton      our kernels: 16 bit on CUDA devices
    flash-attn  the flash-attn-4 package, where it is installed: 16 bit on CUDA devices
    sdpa        torch's scaled_dot_product_attention over rectangles of sequences of similar length
    reference   plain fp32 softmax, one sequence at a time: the oracle for the others

Shapes: B sequences, T tokens, N heads, H head dim. Every backend maps a fused buffer (T, 3, N, H) to (T, N * H).
`cu_seqlens` is int32 (B + 1,) on the device; `table` is the rotary table at the T positions, None with ALiBi; `slopes`
are the ALiBi slopes, fp32 (N,), None with rotary positions.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.models.kernels import has_kernels
from virnuc_core.models.memory import to_device
from virnuc_core.specs import AttentionBackend, AttentionChoice, Family, ResolvedPrecision
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

_MAX_HEAD_DIM: Final = 128
# Maximum slots per real token. The CPU gains nothing from fewer, larger calls, so it pads nothing; a GPU needs few
# launches.
_MAX_PADDED_SHARE: Final = {"cpu": 1.0, "cuda": 1.25}

_MAX_BIAS_ELEMENTS: Final = 2**24  # scores or biases held at once: 64 MB in fp32
_MAX_SCORES: Final = 2**22  # of `_product_attention`: 8 MB in bf16
# In bf16 on the CPU, torch's fused operator in fp32 is up to 2.4 times as fast as `_product_attention` for heads of 16
# and 24, and slower for wider ones.
_MAX_WIDENED_HEAD: Final = 24

_log = logging.getLogger(__name__)


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence of each packed token, int64 (T,), 0..B-1; empty sequences are allowed.

    `cu_seqlens` is int32 or int64 (B + 1,), starting at 0; `num_tokens`, its last entry, is passed to avoid
    synchronising.
    """
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The 0-based position of each packed token in its sequence, int64 (T,); see `sequence_index`."""
    starts = cu_seqlens.long()[sequence_index(cu_seqlens, num_tokens)]
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


def pair_rows(queries: Tensor, keys: Tensor, values: Tensor, num_heads: int) -> Tensor:
    """Joins the rows of queries, keys and values, each (N * H, ...), to (3 * N * H, ...), with rotary partners side by side.

    Published weights rotate column i of a head with column i + H / 2. Scores do not change when the columns of
    queries and keys are permuted alike, and neighbours can be rotated within a register.
    """
    paired = [part.unflatten(0, (num_heads, 2, -1)).transpose(1, 2) for part in (queries, keys)]
    return torch.cat((*paired, values.unflatten(0, (num_heads, -1, 2)))).flatten(0, 2)


def rotary_table(head_dim: int, positions: Tensor) -> Tensor:
    """Cosine and sine of the rotary angles at `positions` (P,), fp32 (P, H / 2, 2) whatever the model's dtype.

    In half precision the angles would be off by 0.16 rad at position 1022, so they are never cast with the weights.

    Source: fair-esm 2.0.0, esm/rotary_embedding.py.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = torch.outer(positions.float(), 1.0 / 10_000.0**exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(heads: Tensor, table: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of `heads` (T, ..., H) by a `rotary_table` (T, H / 2, 2), in fp32."""
    wide = heads.float()
    per_token = (len(heads), *(1,) * (heads.dim() - 2), -1)
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    if heads.device.type != "cpu":
        rotated = pairs * torch.view_as_complex(table).view(per_token)
        return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)
    # On the CPU, torch rounds complex products differently where the share of a thread begins or ends within a row.
    cosines, sines = (part.repeat_interleave(2, dim=-1).view(per_token) for part in table.unbind(-1))
    turned = torch.view_as_real(pairs * 1j).flatten(-2)  # by 90 degrees, exactly
    return (wide * cosines).add_(turned.mul_(sines)).to(heads.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """The ALiBi slope of each head, fp32 (N,), for any number of heads.

    A power of two n has the slopes 2^(-8/n), 2^(-16/n) .. 2^-8. Any other number takes those of the power of two
    below it, then every other slope of the power of two above it.

    Source: Press et al. 2022 (ALiBi), as used by the DNABERT-S authors' bert_layers.py.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * (i + 1) / below for i in range(below)]
    exponents += [4.0 * (2 * i + 1) / below for i in range(num_heads - below)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


def split_qkv(qkv: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Splits (T, 3, N, H) into queries, keys and values (T, N, H); with a table, queries and keys are rotated."""
    queries_keys, values = qkv[:, :2], qkv[:, 2]
    if table is not None:
        queries_keys = apply_rotary(queries_keys, table)
    queries, keys = queries_keys.unbind(1)
    return queries, keys, values


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """softmax(q k^T / sqrt(H) + bias) v in fp32, one sequence at a time: the oracle for the other backends."""

    lengths: tuple[int, ...]
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        outputs = []
        for q, k, v in zip(*(x.float().split(self.lengths) for x in split_qkv(qkv, self.table)), strict=True):
            length, num_heads, head_dim = q.shape
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            for begin, end in _query_blocks(length, num_heads):
                scores = q[:, begin:end] @ k.transpose(1, 2) * head_dim**-0.5
                if self.slopes is not None:
                    scores = scores + _alibi_bias(self.slopes, begin, end, length)
                outputs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(outputs).to(qkv.dtype)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive sequences of similar length, padded to one (num_sequences, length) shape.

    Attributes:
        first_token: offset in the packed buffer.
        gather_idx: int64 (num_sequences * length,), the token of each slot; padding repeats its sequence's first
            token.
        unpad_idx: int64 (real tokens,), the slots that hold tokens; like `gather_idx`, None without padding.
        bias: (num_sequences or 1, N or 1, 1 or length, length), ALiBi plus -inf on padding; None if there is neither,
            or if ALiBi is computed block by block.
    """

    num_sequences: int
    length: int
    first_token: int
    gather_idx: Tensor | None
    unpad_idx: Tensor | None
    bias: Tensor | None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Tensor:
        """Attention within the rectangle: (T, N, H) of the whole batch -> (real tokens of the rectangle, N * H)."""
        q, k, v = (self._pad(x) for x in (queries, keys, values))
        is_bf16_on_cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16
        is_fused = not is_bf16_on_cpu or q.shape[-1] <= _MAX_WIDENED_HEAD
        blocks: Iterable[tuple[int, int]] = [(0, self.length)]
        if not is_fused:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            blocks = _query_blocks(self.length, q.shape[0] * q.shape[1], _MAX_SCORES)
        elif is_bf16_on_cpu:
            q, k, v = q.float(), k.float(), v.float()
        if is_fused and slopes is not None and self.bias is None:
            blocks = _query_blocks(self.length, len(slopes))
        dot_product_attention = functional.scaled_dot_product_attention if is_fused else _product_attention
        parts = [
            dot_product_attention(q[:, :, begin:end], k, v, attn_mask=self._bias(slopes, begin, end, q.dtype))
            for begin, end in blocks
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        tokens: Tensor = output.transpose(1, 2).flatten(2).flatten(0, 1).to(queries.dtype)
        return tokens if self.unpad_idx is None else tokens.index_select(0, self.unpad_idx)

    def _bias(self, slopes: Tensor | None, begin: int, end: int, dtype: torch.dtype) -> Tensor | None:
        """The bias of the queries begin..end-1."""
        if self.bias is not None:
            return (self.bias if self.bias.shape[2] == 1 else self.bias[:, :, begin:end]).to(dtype)
        if slopes is None:
            return None
        return _alibi_bias(slopes, begin, end, self.length).to(dtype).unsqueeze(0)

    def _pad(self, heads: Tensor) -> Tensor:
        """(T, N, H) -> (num_sequences, N, length, H)."""
        if self.gather_idx is None:
            part = heads[self.first_token : self.first_token + self.num_sequences * self.length]
        else:
            part = heads.index_select(0, self.gather_idx)
        sequences: Tensor = part.unflatten(0, (self.num_sequences, self.length))
        return sequences.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class RectangleAttention:
    """scaled_dot_product_attention over rectangles that together cover every token once."""

    rectangles: tuple[Rectangle, ...]
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        queries, keys, values = split_qkv(qkv, self.table)
        parts = [rectangle.attend(queries, keys, values, self.slopes) for rectangle in self.rectangles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _build_rectangles(
    cu_seqlens: npt.NDArray[np.int32], slopes: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Rectangle, ...]:
    """Cuts a batch into rectangles; sequences sorted longest first need the fewest and the least padding."""
    lengths = np.diff(cu_seqlens).astype(np.int64)
    lengths = lengths[lengths > 0]
    num_heads = 1 if slopes is None else len(slopes)
    rectangles = []
    begin = first_token = 0
    while begin < len(lengths):
        longest = np.maximum.accumulate(lengths[begin:])
        slots = longest * np.arange(1, len(longest) + 1)
        fits = (slots <= _MAX_PADDED_SHARE[device.type] * np.cumsum(lengths[begin:])) & (
            num_heads * slots * longest <= _MAX_BIAS_ELEMENTS
        )
        end = begin + max(1, len(fits) if fits.all() else int(fits.argmin()))
        rectangles.append(_build_rectangle(first_token, lengths[begin:end], slopes, device, dtype))
        first_token += int(lengths[begin:end].sum())
        begin = end
    return tuple(rectangles)


def _build_rectangle(
    first_token: int,
    lengths: npt.NDArray[np.int64],
    slopes: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Rectangle:
    length = int(lengths.max())
    bias = gather_idx = unpad_idx = None
    if slopes is not None and len(slopes) * length * length <= _MAX_BIAS_ELEMENTS:
        bias = _alibi_bias(slopes, 0, length, length).unsqueeze(0)
    if (lengths < length).any():
        is_real = np.arange(length) < lengths[:, None]
        starts = first_token + np.cumsum(lengths) - lengths
        slots = starts[:, None] + np.where(is_real, np.arange(length), 0)
        gather_idx = to_device(slots.ravel(), device)
        unpad_idx = to_device(np.flatnonzero(is_real), device)
        mask = to_device(np.where(is_real, np.float32(0), np.float32(-np.inf)), device)[:, None, None, :]
        bias = mask if bias is None else bias + mask
    bias = None if bias is None else bias.to(dtype)
    return Rectangle(len(lengths), length, first_token, gather_idx, unpad_idx, bias)


def _product_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """scaled_dot_product_attention by matrix products: (S, N, P, H), twice (S, N, L, H) -> (S, N, P, H).

    In bf16 on the CPU it takes two thirds of the time of torch's fused operator. Scores are rounded to bf16.
    """
    queries, keys, values = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scale = q.shape[-1] ** -0.5
    scores = torch.baddbmm(q.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale)
    if attn_mask is not None:
        scores = (scores.unflatten(0, q.shape[:2]) + attn_mask).flatten(0, 1)
    output: Tensor = (scores.softmax(-1) @ values).unflatten(0, q.shape[:2])
    return output


def _query_blocks(
    length: int, num_heads: int, max_elements: int = _MAX_BIAS_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose scores against all `length` keys fit the memory bound."""
    rows = max(1, max_elements // max(1, num_heads * length))
    for begin in range(0, length, rows):
        yield begin, min(begin + rows, length)


def _alibi_bias(slopes: Tensor, begin: int, end: int, length: int) -> Tensor:
    """-slope * |i - j| for queries begin..end-1 and all keys, fp32 (N, end - begin, length).

    Source: the DNABERT-S authors' symmetric ALiBi (bert_layers.py, rebuild_alibi_tensor).
    """
    queries = torch.arange(begin, end, device=slopes.device, dtype=torch.float32)
    keys = torch.arange(length, device=slopes.device, dtype=torch.float32)
    distance = (queries[:, None] - keys[None, :]).abs()
    return -slopes[:, None, None] * distance


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Our kernels; `virnuc_core.models.kernels.attention.packed_attention` documents the attributes."""

    tiles: tuple[Tensor, ...]
    cos_sin: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor, quantize: bool = False) -> Tensor:
        """(T, 3, N, H) -> (T, N * H), in fp8 e4m3 if `quantize`; overwrites keys."""
        from virnuc_core.models.kernels.attention import packed_attention

        return packed_attention(qkv, self.tiles, self.cos_sin, self.slopes, quantize)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The kernels of flash-attn-4, which are compiled at their first call for each head dim and dtype."""

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        alibi: dict[str, Any] = {}
        if self.slopes is not None:
            from virnuc_core.models.kernels.alibi_score import add_alibi

            alibi = {"score_mod": add_alibi, "aux_tensors": [self.slopes]}
        output: Tensor
        output, _ = _flash_attn()(
            *split_qkv(qkv, self.table),
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            **alibi,
        )
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
        head_dim: int,
        alibi_heads: int | None = None,
    ) -> Self:
        """Plans on the host, then copies to `device` without synchronising.

        `cu_seqlens` is int32 (B + 1,), starting at 0; `device` and `dtype` are the model's. `alibi_heads` is N of a
        model with ALiBi, None of one with rotary positions.
        """
        slopes = None if alibi_heads is None else _slopes_on(alibi_heads, device)
        if backend == "triton":
            return cls(*_build_triton(cu_seqlens, head_dim, slopes, device))
        bounds = to_device(cu_seqlens, device)
        table = None
        if slopes is None:
            table = rotary_table(head_dim, position_ids(bounds, int(cu_seqlens[-1])))
        lengths = np.diff(cu_seqlens)
        longest = int(lengths.max(initial=0))
        attention: Callable[[Tensor], Tensor]
        if backend == "reference":
            attention = ReferenceAttention(tuple(lengths.tolist()), table, slopes)
        elif backend == "flash-attn":
            attention = FlashAttention(bounds, longest, table, slopes)
        else:
            attention = RectangleAttention(
                _build_rectangles(cu_seqlens, slopes, device, dtype), table, slopes
            )
        return cls(bounds, attention)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that `stream` uses the layout, which was allocated on another one."""
        for tensor in _tensors(self):
            tensor.record_stream(stream)


def packed_attention(qkv: Tensor, layout: PackedLayout, *, quantize: bool = False) -> Tensor:
    """Attention of every token to all tokens of its own sequence: (T, 3, N, H) -> (T, N * H).

    The result has the dtype of `qkv`, or is fp8 e4m3 with `quantize`; then no value may exceed 448. With rotary
    positions, the columns of queries and keys are in the order of `pair_rows`.
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
    wants_kernel = choice in ("triton", "flash-attn")
    suits = precision != "fp32" and head_dim <= _MAX_HEAD_DIM and not head_dim % 2
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    if wants_kernel and not on_cuda:
        raise DeviceError(f"--attention {choice} needs a CUDA device: omit it, or use sdpa.")
    if wants_kernel and not suits:
        raise UsageError(
            f"--attention {choice} supports fp16 and bf16 with even head widths up to {_MAX_HEAD_DIM}, not {precision} with "
            f"head width {head_dim}: omit it, or use sdpa."
        )
    if choice == "triton" and not has_kernels(device):
        raise DeviceError(
            "--attention triton needs Triton and a GPU of compute capability 8.0 or later: omit it, or use sdpa."
        )
    if choice == "flash-attn":
        _require_flash_attn(device, family, head_dim)
    backend: AttentionBackend = "sdpa"
    if choice != "auto":
        backend = choice
    elif suits and has_kernels(device):
        backend = "triton"
    _log.info("attention of %s on %s: %s (requested: %s)", family, device, backend, choice)
    return backend


def _require_flash_attn(device: torch.device, family: Family, head_dim: int) -> None:
    try:
        if (found := installed_version(FLASH_ATTN)) != FLASH_ATTN_VERSION:
            raise ImportError(f"{found or 'none'} is installed")
        _flash_attn()
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"--attention flash-attn needs {FLASH_ATTN} {FLASH_ATTN_VERSION} ({type(error).__name__}: {error}): "
            'pip install --force-reinstall "virnuc[gpu]", or omit --attention.'
        ) from error
    if head_dim % 8:
        raise UsageError(
            f"--attention flash-attn needs a head width that is a multiple of 8, not {head_dim}: use sdpa, or omit --attention."
        )
    major, minor = torch.cuda.get_device_capability(device)
    # ALiBi, which DNABERT-S needs, is in its kernels for Hopper and newer GPUs.
    if major < 8 or (major == 8 and family == "dnabert_s"):
        what, least = ("ALiBi", "9.0") if family == "dnabert_s" else ("attention", "8.0")
        raise DeviceError(
            f"--attention flash-attn supports {what} from compute capability {least}, and this GPU has {major}.{minor}: use "
            "triton or sdpa, or omit --attention."
        )


@cache
def _flash_attn() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    # Its compiler warns about an argument of its own, which does not affect the compiled code.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def _build_triton(
    cu_seqlens: npt.NDArray[np.int32], head_dim: int, slopes: Tensor | None, device: torch.device
) -> tuple[Tensor, TritonAttention]:
    from virnuc_core.models.kernels import attention as kernels  # imports triton

    planned = kernels.plan_tiles(cu_seqlens, whole=kernels.takes_whole_sequences(device, head_dim))
    bounds, *tiles = (to_device(part, device) for part in (cu_seqlens, *planned))
    cos_sin = None
    if slopes is None:
        longest = int(np.diff(cu_seqlens).max(initial=1))
        # A power of two, so that few tables are ever made.
        num_positions = max(kernels.BLOCK, 1 << (longest - 1).bit_length())
        cos_sin = _rotary_table_on(head_dim, kernels.padded_head_dim(head_dim), num_positions, device)
    return bounds, TritonAttention(tuple(tiles), cos_sin, slopes)


@lru_cache(maxsize=16)
def _slopes_on(num_heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(num_heads).to(device)


@lru_cache(maxsize=16)
def _rotary_table_on(head_dim: int, padded: int, num_positions: int, device: torch.device) -> Tensor:
    """The rotary table at positions 0, 1, ..., its rows zero-padded for heads of `padded` columns.

    Computed on the CPU: a GPU would first load a kernel for each function, which takes longer.
    """
    table = rotary_table(head_dim, torch.arange(num_positions))
    return functional.pad(table, (0, 0, 0, (padded - head_dim) // 2)).to(device)


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, tuple):
        return [tensor for member in part for tensor in _tensors(member)]
    if is_dataclass(part):
        return [tensor for field in fields(part) for tensor in _tensors(getattr(part, field.name))]
    return []
