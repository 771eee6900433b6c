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


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    branch, residual, gain, shift, total, normed, num_rows, eps,
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
    if total is not None:
        tl.store(total + at, x.to(total.dtype.element_ty), mask=real)
    mean = tl.sum(x, 1) / D
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / D
    gains = tl.load(gain + column, mask=in_row, other=0.0).to(tl.float32)
    shifts = tl.load(shift + column, mask=in_row, other=0.0).to(tl.float32)
    y = centred * tl.rsqrt(variance + eps)[:, None] * gains[None, :] + shifts[None, :]
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=real)


def add_norm(
    branch: Tensor | None, residual: Tensor, gain: Tensor, shift: Tensor, eps: float, *, post_norm: bool
) -> tuple[Tensor, Tensor]:
    """LayerNorm of residual + branch, in one pass.

    `residual` is fp16 or bf16 (T, D), contiguous; `branch` is (T, D), where present; `gain` and `shift` are LayerNorm's
    weight and bias, (D,). Returns what the next branch is added to, with `post_norm` the LayerNorm, else the sum; and the
    LayerNorm, both (T, D) in the dtype of `residual`.
    """
    num_rows, width = residual.shape
    normed = torch.empty_like(residual)
    total = None if post_norm or branch is None else torch.empty_like(residual)
    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    launch(
        _add_norm_kernel, triton.cdiv(num_rows, rows), branch, residual, gain, shift, total, normed, num_rows, eps,
        width, columns, rows, num_warps=4 if columns <= 1024 else max(2, columns // 1024),
    )  # fmt: skip
    return (normed if total is None else total), normed


@triton.jit(do_not_specialize=["num_rows"])
def _norm_factors_kernel(
    sums, squares, scale, quantized, rstds, means, factors, num_rows, eps, alpha, unit,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row = row < num_rows
    real = is_row[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(sums + at, mask=real, other=0.0).to(tl.float32)
    squared = x * x
    if squares is not None:
        squared = tl.load(squares + at, mask=real, other=0.0)
    mean = tl.sum(x, 1) / D
    rstd = tl.rsqrt(tl.maximum(tl.sum(squared, 1) / D - mean * mean, 0.0) + eps)
    tl.store(rstds + row, rstd, mask=is_row)
    tl.store(means + row, mean * rstd, mask=is_row)
    if scale is not None:
        own = unit * rstd
        used = own
        if quantized is not None:
            tl.store(quantized + at, (x * own[:, None]).to(tl.float8e4nv), mask=real)
        else:
            used = tl.load(scale + row, mask=is_row, other=1.0)
        tl.store(factors + row, alpha * rstd / used, mask=is_row)
        tl.store(scale + row, own, mask=is_row)


def norm_factors(
    sums: Tensor,
    squares: Tensor | None,
    width: int,
    eps: float,
    *,
    scale: Tensor | None = None,
    alpha: float = 1.0,
    unit: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the product after a LayerNorm of `width` values multiplies its rows by.

    `sums` (T, C) are sums of parts of a token's values, and `squares` fp32 (T, C) those of their squares; without
    `squares`, `sums` are the values. In fp8, `scale` fp32 (1, T) is what the values were multiplied by to be quantized, and
    overwritten with what the next ones are to be: `unit` over the standard deviation; and `alpha` is
    what the product is to be multiplied by.

    Returns:
        Factors, reciprocals of the standard deviations, and these times the means, fp32 (1, T); and with `scale` and without
        `squares` the values in fp8, else None.
    """
    num_rows, parts = sums.shape
    rstds, means = (sums.new_empty((1, num_rows), dtype=torch.float32) for _ in range(2))
    factors = rstds if scale is None else torch.empty_like(rstds)
    quantized = None if scale is None or squares is not None else torch.empty_like(sums, dtype=FP8)
    columns = triton.next_power_of_2(parts)
    rows = max(1, 2048 // columns)
    launch(
        _norm_factors_kernel, triton.cdiv(num_rows, rows), sums, squares, scale, quantized, rstds, means, factors,
        num_rows, eps, alpha, unit, width, parts, columns, rows, num_warps=4,
    )  # fmt: skip
    return factors, rstds, means, quantized


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
