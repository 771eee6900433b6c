"""The first matrix product of a feed-forward layer fused with its activation, so that the product is not stored and read.

Where a block has the shared memory of data centre GPUs since Hopper, the kernel is persistent and TMA moves the tiles: the
operands of the next tile are loaded while the last one is activated and stored. Elsewhere, tiles are loaded through
pointers (cp.async), one program computes each, and programs that share a multiprocessor overlap.

Shapes: T tokens, I input width, F width of the feed-forward layer.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

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
    """Tile shape: rows of x, columns of the product (rows of W), depth of one step; pipeline stages; warps; use of TMA."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    tma: bool


_TMA_TILES: Final = Tiles(128, 256, 64, stages=3, warps=8, tma=True)
_POINTER_TILES: Final = Tiles(128, 128, 32, stages=4, warps=4, tma=False)


def choose_tiles(shared_memory: int) -> Tiles:
    """The tiles for a device with `shared_memory` bytes per block."""
    return _TMA_TILES if shared_memory >= _DATACENTER_SHARED_MEMORY else _POINTER_TILES


@triton.jit
def _load(
    matrix, row, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """The tile at `row` and `column`: zeros beyond the last column, and beyond the last row anything."""
    if TMA:
        tile = matrix.load([row, column])
    else:
        rows = tl.minimum(tl.arange(0, ROWS), num_rows - 1 - row)
        columns = column + tl.arange(0, COLUMNS)
        first = matrix + tl.cast(row, tl.int64) * num_columns
        at = first + rows[:, None] * num_columns + columns[None, :]
        tile = tl.load(at, mask=(columns < num_columns)[None, :], other=0.0)
    return tile


@triton.jit
def _store(matrix, tile, row, column, num_rows, num_columns, TMA: tl.constexpr):
    if TMA:
        matrix.store([row, column], tile.to(matrix.dtype))
    else:
        rows = tl.arange(0, tile.shape[0])
        columns = column + tl.arange(0, tile.shape[1])
        first = matrix + tl.cast(row, tl.int64) * num_columns
        at = first + rows[:, None] * num_columns + columns[None, :]
        real = (rows < num_rows - row)[:, None] & (columns < num_columns)[None, :]
        tl.store(at, tile.to(matrix.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_gelu_kernel(
    x, weight, out, bias, num_tokens, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_tokens, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    group_size = GROUP_ROWS * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=TMA):
        first_row = tile // group_size * GROUP_ROWS
        rows_in_group = min(row_tiles - first_row, GROUP_ROWS)
        row = (first_row + tile % rows_in_group) * ROWS
        column = (tile % group_size) // rows_in_group * COLUMNS
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            a = _load(x, row, step * DEPTH, num_tokens, depth, ROWS, DEPTH, TMA)
            b = _load(weight, column, step * DEPTH, num_columns, depth, COLUMNS, DEPTH, TMA)
            y = tl.dot(a, b.T, y)
        if GATED:
            gate, value = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
            _store(out, gelu(gate) * value, row, column // 2, num_tokens, num_columns // 2, TMA)
        else:
            at = column + tl.arange(0, COLUMNS)
            shift = tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)
            _store(out, gelu(y + shift[None, :]), row, column, num_tokens, num_columns, TMA)


@torch.library.custom_op("virnuc::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """GELU of x W^T + b; or, gated, GELU of the even columns of x W^T times the odd ones; (T, F) in the dtype of x.

    `x` is fp16 or bf16 (T, I), contiguous, I a multiple of 8. `weight` is (F, I) and `bias` (F,); gated, `weight` is
    (2 F, I) with the rows of gate and value interleaved, and there is no bias.

    Raises:
        DeviceError: the device lacks resources that the kernel needs.
    """
    num_tokens, depth = x.shape
    num_columns = len(weight)
    out = _empty_result(x, weight, gated)
    tiles = choose_tiles(shared_memory(x.device))
    matrices: tuple[Any, ...] = (x, weight, out)
    programs = triton.cdiv(num_tokens, tiles.rows) * triton.cdiv(num_columns, tiles.columns)
    if tiles.tma:
        stored = tiles.columns // 2 if gated else tiles.columns
        shapes = (tiles.rows, tiles.depth), (tiles.columns, tiles.depth), (tiles.rows, stored)
        matrices = tuple(map(_descriptor, matrices, shapes))
        programs = _multiprocessors(x.device)
    launch(
        _gemm_gelu_kernel, programs, *matrices, bias, num_tokens, num_columns, depth, tiles.rows, tiles.columns,
        tiles.depth, _GROUP_ROWS, gated, tiles.tma, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return _empty_result(x, weight, gated)


def _empty_result(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])


def _descriptor(matrix: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), list(tile))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
