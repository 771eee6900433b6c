"""The first matrix product of a feed-forward layer fused with its activation, so that the product is not stored and read.

Where a block has the shared memory of data centre GPUs since Hopper, the kernel is persistent and TMA moves the tiles: the
operands of the next tile are loaded while the last one is activated and stored. Elsewhere, tiles are loaded through
pointers (cp.async), one program computes each, and programs that share a multiprocessor overlap. In fp8 the result is
quantized, too, with a scale that is known beforehand.

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

from virnuc_core.models.kernels.launch import DATACENTER_SHARED_MEMORY, launch, shared_memory
from virnuc_core.models.kernels.rowwise import FP8

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


def choose_tiles(shared_memory: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a device with `shared_memory` bytes per block, and operands of `dtype`."""
    if shared_memory < DATACENTER_SHARED_MEMORY:
        return Tiles(128, 128, 64 if dtype == FP8 else 32, stages=4, warps=4, tma=False)
    if dtype == FP8:
        return Tiles(128, 256, 128, stages=4, warps=8, tma=True)
    return Tiles(128, 256, 64, stages=3, warps=8, tma=True)


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
def _tanh(x):
    """The instruction for it, which is off by at most 2^-11 of the value."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _coarse_gelu(x, factor):
    """GELU times a factor, in the tanh form, which is off by at most 5e-4, less than e4m3 rounds."""
    half = x * (0.5 * factor)
    return half + half * _tanh(x * (0.7978845608 + 0.0356774081 * (x * x)))


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
    x, weight, out, x_scales, weight_scales, out_scale, bias, num_tokens, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr,
    GATED: tl.constexpr, QUANTIZED: tl.constexpr, TMA: tl.constexpr, MULTIPROCESSORS: tl.constexpr,
):  # fmt: skip
    programs = MULTIPROCESSORS if TMA else tl.num_programs(0)
    row_tiles = tl.cdiv(num_tokens, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    group_size = GROUP_ROWS * column_tiles
    out_factor = 1.0
    if QUANTIZED:
        out_factor = 1.0 / tl.load(out_scale)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=TMA):
        first_row = tile // group_size * GROUP_ROWS
        rows_in_group = min(row_tiles - first_row, GROUP_ROWS)
        row = (first_row + tile % rows_in_group) * ROWS
        column = (tile % group_size) // rows_in_group * COLUMNS
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            a = _load(x, row, step * DEPTH, num_tokens, depth, ROWS, DEPTH, TMA)
            b = _load(weight, column, step * DEPTH, num_columns, depth, COLUMNS, DEPTH, TMA)
            y = tl.dot(a, b.T, y)
        at = column + tl.arange(0, COLUMNS)
        if QUANTIZED:
            rows = row + tl.arange(0, ROWS)
            row_scales = tl.load(x_scales + rows, mask=rows < num_tokens, other=0.0)
            y *= row_scales[:, None]
            y *= tl.load(weight_scales + at, mask=at < num_columns, other=0.0)[None, :]
        if GATED:
            gate, value = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
            gate = _coarse_gelu(gate, out_factor) if QUANTIZED else _gelu(gate)
            _store(out, gate * value, row, column // 2, num_tokens, num_columns // 2, TMA)
        else:
            y += tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)[None, :]
            y = _coarse_gelu(y, out_factor) if QUANTIZED else _gelu(y)
            _store(out, y, row, column, num_tokens, num_columns, TMA)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """GELU of x W^T + b; or, gated, GELU of the even columns of x W^T times the odd ones; (T, F) in the dtype of x.

    `x` is fp16 or bf16 (T, I), contiguous, I a multiple of 8. `weight` is (F, I) and `bias` (F,); gated, `weight` is
    (2 F, I) with the rows of gate and value interleaved, and there is no bias. With `scales`, all fp32, `x`, `weight`
    and the result are in fp8 e4m3 and I is a multiple of 16: `x` and `weight` are to be multiplied by the first two, one
    for each row, and the result is divided by the third, (1, 1).

    Raises:
        DeviceError: the device lacks resources that the kernel needs.
    """
    num_tokens, depth = x.shape
    num_columns = len(weight)
    out = x.new_empty(num_tokens, num_columns // 2 if gated else num_columns)
    tiles = choose_tiles(shared_memory(x.device), x.dtype)
    matrices: tuple[Any, ...] = (x, weight, out)
    programs = triton.cdiv(num_tokens, tiles.rows) * triton.cdiv(num_columns, tiles.columns)
    multiprocessors = _multiprocessors(x.device)
    if tiles.tma:
        stored = tiles.columns // 2 if gated else tiles.columns
        shapes = (tiles.rows, tiles.depth), (tiles.columns, tiles.depth), (tiles.rows, stored)
        matrices = tuple(map(_descriptor, matrices, shapes))
        programs = multiprocessors
    launch(
        _gemm_gelu_kernel, programs, *matrices, *(scales or (None, None, None)), bias, num_tokens, num_columns, depth,
        tiles.rows, tiles.columns, tiles.depth, _GROUP_ROWS, gated, scales is not None, tiles.tma, multiprocessors,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _descriptor(matrix: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, matrix.shape, matrix.stride(), list(tile))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
