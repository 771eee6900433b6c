"""The first matrix product of a feed-forward layer fused with its activation, so that the product is not stored and read.

For GPUs before Hopper, and gaming ones after it: tiles are loaded through pointers (cp.async), one program computes each,
and programs that share a multiprocessor overlap.

Shapes: T tokens, I input width, F width of the feed-forward layer.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.models.kernels.launch import launch

_ROWS: Final = 128  # of x, in a tile
_COLUMNS: Final = 128  # of the product, rows of W
_DEPTH: Final = 32  # of a step
_GROUP_ROWS: Final = 16  # rows of tiles scheduled together, which share operands in L2


@triton.jit
def _gelu(x):
    """X times the normal distribution function of x.

    That is x * sigmoid(x * p(x^2)), p fitted to the logit of the distribution function: off from the erf form
    by at most 7e-7, and by 1.5e-4 of its value down to x = -3, both below the rounding of fp16.
    """
    square = tl.minimum(x * x, 25.0)
    p = 5.59891033e-06 + square * -1.13265507e-07
    p = -9.45555670e-05 + square * p
    p = -1.15617260e-04 + square * p
    p = 7.27311525e-02 + square * p
    p = 1.59574532e00 + square * p
    return x / (1.0 + tl.exp2(x * p * -1.4426950408889634))


@triton.jit
def _load(matrix, row, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile at `row` and `column`: zeros beyond the last column, and beyond the last row anything."""
    rows = tl.minimum(tl.arange(0, ROWS), num_rows - 1 - row)
    columns = column + tl.arange(0, COLUMNS)
    at = matrix + tl.cast(row, tl.int64) * num_columns + rows[:, None] * num_columns + columns[None, :]
    return tl.load(at, mask=(columns < num_columns)[None, :], other=0.0)


@triton.jit
def _store(matrix, tile, row, column, num_rows, num_columns):
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    at = matrix + tl.cast(row, tl.int64) * num_columns + rows[:, None] * num_columns + columns[None, :]
    real = (rows < num_rows - row)[:, None] & (columns < num_columns)[None, :]
    tl.store(at, tile.to(matrix.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_gelu_kernel(
    x, weight, out, bias, num_tokens, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_tokens, ROWS)
    group_size = GROUP_ROWS * tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0)
    first_row = tile // group_size * GROUP_ROWS
    rows_in_group = min(row_tiles - first_row, GROUP_ROWS)
    row = (first_row + tile % rows_in_group) * ROWS
    column = (tile % group_size) // rows_in_group * COLUMNS
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(tl.cdiv(depth, DEPTH)):
        a = _load(x, row, step * DEPTH, num_tokens, depth, ROWS, DEPTH)
        b = _load(weight, column, step * DEPTH, num_columns, depth, COLUMNS, DEPTH)
        y = tl.dot(a, b.T, y)
    if GATED:
        gate, value = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
        _store(out, _gelu(gate) * value, row, column // 2, num_tokens, num_columns // 2)
    else:
        at = column + tl.arange(0, COLUMNS)
        y += tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)[None, :]
        _store(out, _gelu(y), row, column, num_tokens, num_columns)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of x W^T + b; or, gated, without b, GELU of the even columns of x W^T times the odd ones; (T, F) in the dtype of x.

    `x` is fp16 or bf16 (T, I), contiguous, I a multiple of 8. `weight` is (F, I) and `bias` (F,); gated, `weight` is
    (2 F, I) with the rows of gate and value interleaved, and `bias` is None.

    Raises:
        DeviceError: the device lacks resources that the kernel needs.
    """
    num_tokens, depth = x.shape
    num_columns, gated = len(weight), bias is None
    out = x.new_empty(num_tokens, num_columns // 2 if gated else num_columns)
    programs = triton.cdiv(num_tokens, _ROWS) * triton.cdiv(num_columns, _COLUMNS)
    launch(
        _gemm_gelu_kernel, programs, x, weight, out, bias, num_tokens, num_columns, depth,
        _ROWS, _COLUMNS, _DEPTH, _GROUP_ROWS, gated, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
