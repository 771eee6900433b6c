"""The first product of a feed-forward layer with its activation, so that what lies between is never stored.

A persistent kernel for Hopper and later: one program a multiprocessor takes one tile of the result after
another, and reads the next tile's operands while it activates and stores the last. With the activation it
takes less time than the library's product and a kernel for the activation.

Shapes: T tokens, I input width, F width of the feed-forward layer.
"""

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from virnuc_core.models.kernels.rowwise import gelu

_ROWS: Final = 128
_COLUMNS: Final = 256
_DEPTH: Final = 64
_ROWS_TOGETHER: Final = 16  # tiles in a column of tiles that run side by side, and share what the cache holds


@triton.jit
def _product_kernel(
    x, weight, out, bias, num_tokens, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, TOGETHER: tl.constexpr, PROGRAMS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_tokens, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    group_size = TOGETHER * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first_row = tile // group_size * TOGETHER
        rows_in_group = min(row_tiles - first_row, TOGETHER)
        row = (first_row + tile % rows_in_group) * ROWS
        column = (tile % group_size) // rows_in_group * COLUMNS
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            y = tl.dot(x.load([row, step * DEPTH]), weight.load([column, step * DEPTH]).T, y)
        if GATED:
            gate, value = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
            out.store([row, column // 2], (gelu(gate) * value).to(out.dtype))
        else:
            at = column + tl.arange(0, COLUMNS)
            shift = tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)
            out.store([row, column], gelu(y + shift[None, :]).to(out.dtype))


@torch.library.custom_op("virnuc::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """GELU of x W^T + b; or, gated, GELU of the even columns of x W^T times the odd ones.

    Args:
        x: fp16 or bf16 (T, I), contiguous, I a multiple of 8.
        weight: (F, I), or (2 F, I) when gated, in the dtype of x.
        bias: (F,); None when gated.
        gated: whether rows of gate and value alternate in `weight`.

    Returns:
        (T, F) in the dtype of x.
    """
    num_tokens, depth = x.shape
    num_columns = len(weight)
    out = _empty_result(x, weight, gated)
    stored = _COLUMNS // 2 if gated else _COLUMNS
    programs = _multiprocessors(x.device)
    _product_kernel[(programs,)](
        TensorDescriptor(x, x.shape, x.stride(), [_ROWS, _DEPTH]),
        TensorDescriptor(weight, weight.shape, weight.stride(), [_COLUMNS, _DEPTH]),
        TensorDescriptor(out, out.shape, out.stride(), [_ROWS, stored]),
        bias, num_tokens, num_columns, depth, _ROWS, _COLUMNS, _DEPTH, _ROWS_TOGETHER, programs, gated,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return _empty_result(x, weight, gated)


def _empty_result(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
