"""The first matrix product of a feed-forward layer fused with its activation: a persistent kernel for Hopper and later.

The operands of the next tile are loaded while the last one is activated and stored, which is faster than the
library's product followed by a kernel for the activation. In fp8 the result is quantized, too, with a scale that is
known beforehand.

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
from virnuc_core.models.kernels.rowwise import FP8, gelu

_DATACENTER_SHARED_MEMORY: Final = 227 * 1024  # bytes per block on data centre GPUs since Hopper
_GROUP_ROWS: Final = 16  # rows of tiles scheduled together, which share operands in L2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shape: rows of x, columns of the product (rows of W), depth of one step, and number of pipeline stages."""

    rows: int
    columns: int
    depth: int
    stages: int


def choose_tiles(shared_memory: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a device with `shared_memory` bytes per block, and operands of `dtype`."""
    if shared_memory < _DATACENTER_SHARED_MEMORY:
        return Tiles(128, 128, 64, 3)
    return Tiles(128, 256, 128, 4) if dtype == FP8 else Tiles(128, 256, 64, 3)


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


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_gelu_kernel(
    x, weight, out, x_scales, weight_scales, out_scale, bias, num_tokens, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, GATED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_tokens, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    group_size = GROUP_ROWS * column_tiles
    out_factor = 1.0
    if QUANTIZED:
        out_factor = 1.0 / tl.load(out_scale)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first_row = tile // group_size * GROUP_ROWS
        rows_in_group = min(row_tiles - first_row, GROUP_ROWS)
        row = (first_row + tile % rows_in_group) * ROWS
        column = (tile % group_size) // rows_in_group * COLUMNS
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            y = tl.dot(x.load([row, step * DEPTH]), weight.load([column, step * DEPTH]).T, y)
        at = column + tl.arange(0, COLUMNS)
        if QUANTIZED:
            rows = row + tl.arange(0, ROWS)
            row_scales = tl.load(x_scales + rows, mask=rows < num_tokens, other=0.0)
            y *= row_scales[:, None]
            y *= tl.load(weight_scales + at, mask=at < num_columns, other=0.0)[None, :]
        if GATED:
            gate, value = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
            gate = _coarse_gelu(gate, out_factor) if QUANTIZED else gelu(gate)
            out.store([row, column // 2], (gate * value).to(out.dtype))
        else:
            y += tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)[None, :]
            y = _coarse_gelu(y, out_factor) if QUANTIZED else gelu(y)
            out.store([row, column], y.to(out.dtype))


@torch.library.custom_op("virnuc::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """GELU of x W^T + b; or, gated, GELU of the even columns of x W^T times the odd ones; (T, F) in the dtype of x.

    `x` is fp16 or bf16 (T, I), contiguous, I a multiple of 8. `weight` is (F, I) and `bias` (F,); gated, `weight` is
    (2 F, I) with the rows of gate and value interleaved, and there is no bias.
    """
    out = _empty_result(x, weight, gated)
    _launch(x, None, weight, None, bias, out, None, gated)
    return out


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return _empty_result(x, weight, gated)


@torch.library.custom_op("virnuc::fp8_linear_gelu", mutates_args=())
def fp8_linear_gelu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gated: bool,
    out_scale: Tensor,
) -> Tensor:
    """`linear_gelu` of operands in fp8 e4m3, in e4m3 and divided by `out_scale`, fp32 (1, 1).

    `x` (T, I), I a multiple of 16, and `weight` are to be multiplied by their scales, fp32, one for each row.
    """
    out = _empty_result(x, weight, gated)
    _launch(x, x_scale, weight, weight_scale, bias, out, out_scale, gated)
    return out


@fp8_linear_gelu.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gated: bool,
    out_scale: Tensor,
) -> Tensor:
    return _empty_result(x, weight, gated)


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    gated: bool,
) -> None:
    num_tokens, depth = x.shape
    tiles = choose_tiles(shared_memory(x.device), x.dtype)
    stored = tiles.columns // 2 if gated else tiles.columns
    programs = _multiprocessors(x.device)
    launch(
        _gemm_gelu_kernel, programs,
        TensorDescriptor(x, x.shape, x.stride(), [tiles.rows, tiles.depth]),
        TensorDescriptor(weight, weight.shape, weight.stride(), [tiles.columns, tiles.depth]),
        TensorDescriptor(out, out.shape, out.stride(), [tiles.rows, stored]),
        x_scale, weight_scale, out_scale, bias, num_tokens, len(weight), depth,
        tiles.rows, tiles.columns, tiles.depth, _GROUP_ROWS, programs, gated, out_scale is not None,
        num_warps=8, num_stages=tiles.stages,
    )  # fmt: skip


def _empty_result(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
