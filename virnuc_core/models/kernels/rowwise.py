"""Kernels before, between and after matrix products: embeddings, residual and LayerNorm, fp8, and mean pooling.

Each reads its input once and keeps it in registers, so all are bound by memory bandwidth. Arithmetic is fp32.

Shapes: T tokens, D width of the hidden states.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.models.kernels.launch import launch

FP8: Final = torch.float8_e4m3fn
_MEAN_TOKENS: Final = 32
_MEAN_COLUMNS: Final = 64


@triton.jit
def _fp8_scale(row_max):
    """What a row is divided by, so that its largest value becomes the largest of e4m3."""
    return tl.maximum(row_max, 1e-12) / 448.0


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    branch, branch_bias, residual, gain, shift, total, normed, quantized, scales, num_rows, eps,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_row = column < D
    real = (row < num_rows)[:, None] & in_row[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    x = tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    if branch is not None:
        x += tl.load(branch + at, mask=real, other=0.0).to(tl.float32)
    if branch_bias is not None:
        x += tl.load(branch_bias + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if total is not None:
        tl.store(total + at, x.to(total.dtype.element_ty), mask=real)
    mean = tl.sum(x, 1) / D
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / D
    gains = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    shifts = tl.load(shift + column, mask=in_row, other=0.0).to(tl.float32)
    y = centred * tl.rsqrt(variance + eps)[:, None] * gains[None, :] + shifts[None, :]
    if normed is not None:
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=real)
    if quantized is not None:
        scale = _fp8_scale(tl.max(tl.abs(y), 1))
        tl.store(quantized + at, (y * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask=real)
        tl.store(scales + row, scale, mask=row < num_rows)


def add_norm(
    branch: Tensor | None,
    branch_bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    post_norm: bool,
    quantize: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """LayerNorm of residual + branch + bias, in one pass.

    `residual` is fp16 or bf16 (T, D), contiguous; `branch` is (T, D) and `branch_bias` (D,), where present; `gain`
    and `shift` are LayerNorm's weight and bias, (D,). Returns what the next branch is added to, in the dtype of
    `residual`: with `post_norm` the LayerNorm, else the sum, or `residual` itself without a branch; then the LayerNorm,
    both (T, D), which is in fp8 e4m3 with `quantize`; and then its fp32 scales (T, 1).
    """
    num_rows, width = residual.shape
    kept = torch.empty_like(residual) if post_norm or branch is not None else residual
    normed = quantized = scales = None
    if quantize:
        quantized = torch.empty_like(residual, dtype=FP8)
        scales = residual.new_empty((num_rows, 1), dtype=torch.float32)
    if post_norm:
        normed = kept
    elif not quantize:
        normed = torch.empty_like(residual)
    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    launch(
        _add_norm_kernel, triton.cdiv(num_rows, rows), branch, branch_bias, residual, gain, shift,
        None if post_norm or branch is None else kept, normed, quantized, scales, num_rows, eps, width, columns, rows,
        num_warps=4 if columns <= 1024 else max(2, columns // (2048 if quantize else 1024)),
    )  # fmt: skip
    result = quantized if quantized is not None else normed
    assert result is not None
    return kept, result, scales


@triton.jit
def _embed_kernel(
    input_ids, cu_seqlens, table, out, share, MASK: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the embeddings of one sequence, times `share` over its share of tokens other than MASK."""
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    sequence = tl.program_id(0) // BLOCKS
    begin = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - begin
    input_ids += begin
    masked = tl.zeros([TOKENS], tl.int32)
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        masked += (tl.load(input_ids + token, mask=token < count, other=-1) == MASK).to(tl.int32)
    observed = 1.0 - tl.div_rn(tl.sum(masked, 0).to(tl.float32), count.to(tl.float32))
    scale = tl.div_rn(share, tl.where(observed > 0.0, observed, 1.0))
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    out += begin.to(tl.int64) * D
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        ids = tl.load(input_ids + token, mask=token < count, other=0)
        real = (token < count)[:, None] & (column < D)[None, :]
        values = tl.load(table + ids[:, None] * D + column[None, :], mask=real, other=0.0).to(tl.float32)
        factor = tl.where(ids == MASK, 0.0, scale).to(table.dtype.element_ty).to(tl.float32)
        tl.store(
            out + token[:, None].to(tl.int64) * D + column[None, :],
            (values * factor[:, None]).to(table.dtype.element_ty),
            mask=real,
        )


def embed_tokens(
    input_ids: Tensor, cu_seqlens: Tensor, table: Tensor, mask_token: int, share: float
) -> Tensor:
    """Embeddings (T, D), those of a sequence times `share` over the share of its tokens that are not masked, those zero.

    `input_ids` is int32 or int64 (T,), `cu_seqlens` int32 (B + 1,), `table` (vocabulary, D), contiguous.
    """
    width, num_sequences = table.shape[1], len(cu_seqlens) - 1
    out = table.new_empty((len(input_ids), width))
    launch(
        _embed_kernel, num_sequences * triton.cdiv(width, _MEAN_COLUMNS), input_ids, cu_seqlens, table, out, share,
        mask_token, width, _MEAN_TOKENS, _MEAN_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _mean_kernel(
    hidden, cu_seqlens, out, D: tl.constexpr, SKIPPED: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the mean of one sequence; SKIPPED tokens are left out at either end."""
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    sequence = tl.program_id(0) // BLOCKS
    begin = tl.load(cu_seqlens + sequence).to(tl.int64) + SKIPPED
    count = tl.load(cu_seqlens + sequence + 1) - SKIPPED - begin
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    base = hidden + begin * D + column[None, :]
    sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        real = (token < count)[:, None] & (column < D)[None, :]
        sums += tl.load(base + token[:, None] * D, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / tl.maximum(count, 1)
    tl.store(out + sequence.to(tl.int64) * D + column, mean, mask=column < D)


def segment_mean(hidden_states: Tensor, cu_seqlens: Tensor, include_special_tokens: bool) -> Tensor:
    """`encoder.mean_pool`, contiguous (T, D) -> fp32 (B, D), in an order that depends only on the sequence's length."""
    width, num_sequences = hidden_states.shape[1], len(cu_seqlens) - 1
    out = hidden_states.new_empty((num_sequences, width), dtype=torch.float32)
    launch(
        _mean_kernel, num_sequences * triton.cdiv(width, _MEAN_COLUMNS), hidden_states, cu_seqlens, out, width,
        0 if include_special_tokens else 1, _MEAN_TOKENS, _MEAN_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
