"""The first matrix product of a feed-forward layer fused with its activation: a persistent kernel for Hopper and later.

The operands of the next tile are loaded while the last one is activated and stored, which is faster than the
library's product followed by a kernel for the activation.

Shapes: T tokens, I input width, F width of the feed-forward layer.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from virnuc_core.models.kernels.launch import launch, shared_memory
from virnuc_core.models.kernels.rowwise import gelu

_DATACENTER_SHARED_MEMORY: Final = 227 * 1024  # bytes per block on data centre GPUs since Hopper
_GROUP_ROWS: Final = 16  # rows of tiles scheduled together, which share operands in L2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shape: rows of x, columns of the product (rows of W), depth of one step, and number of pipeline stages."""

    rows: int
    columns: int
    depth: int
    stages: int


def choose_tiles(shared_memory: int) -> Tiles:
    """The tiles for a device with `shared_memory` bytes per block."""
    return Tiles(128, 256, 64, 3) if shared_memory >= _DATACENTER_SHARED_MEMORY else Tiles(128, 128, 64, 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_gelu_kernel(
    x, weight, out, bias, num_tokens, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr, PROGRAMS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_tokens, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    group_size = GROUP_ROWS * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first_row = tile // group_size * GROUP_ROWS
        rows_in_group = min(row_tiles - first_row, GROUP_ROWS)
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
    """GELU of x W^T + b; or, gated, GELU of the even columns of x W^T times the odd ones; (T, F) in the dtype of x.

    `x` is fp16 or bf16 (T, I), contiguous, I a multiple of 8. `weight` is (F, I) and `bias` (F,); gated, `weight` is
    (2 F, I) with the rows of gate and value interleaved, and there is no bias.
    """
    num_tokens, depth = x.shape
    num_columns = len(weight)
    out = _empty_result(x, weight, gated)
    tiles = choose_tiles(shared_memory(x.device))
    stored = tiles.columns // 2 if gated else tiles.columns
    programs = _multiprocessors(x.device)
    launch(
        _gemm_gelu_kernel, programs,
        TensorDescriptor(x, x.shape, x.stride(), [tiles.rows, tiles.depth]),
        TensorDescriptor(weight, weight.shape, weight.stride(), [tiles.columns, tiles.depth]),
        TensorDescriptor(out, out.shape, out.stride(), [tiles.rows, stored]),
        bias, num_tokens, num_columns, depth, tiles.rows, tiles.columns, tiles.depth, _GROUP_ROWS, programs, gated,
        num_warps=8, num_stages=tiles.stages,
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
