"""QuACK's matrix products for Hopper GPUs, with everything between two of them as their epilogues.

The product before a LayerNorm sums up the values of each token, and their squares, by tile of columns. The product after it
multiplies its rows by a factor made of these sums; what else a LayerNorm does is in its weights (`virnuc_core.models.fused`).

Shapes: T tokens, I and O input and output width of a product. Vectors over tokens and outputs are fp32, (1, T) and (1, O).
"""

import os
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from virnuc_core.env_config import home_folder
from virnuc_core.models.kernels.rowwise import FP8


def _as_it_is(function: Any, *, recompile_limit: int | None = None, **options: Any) -> Any:
    return function


# QuACK hands functions that virnuc does not use to torch's compiler, whose import takes three times as long as all the rest.
with patch.object(torch, "compile", _as_it_is), patch.object(torch.compiler, "disable", _as_it_is):
    import quack.cache
    from cutlass.cute.arch import fmin
    from quack.activation import tanh
    from quack.epilogue import gemm_epilogue, unpack
    from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad, TileStore
    from quack.gemm_runtime.host import run_gemm_epi_plan

_FAST_ACCUMULATION: Final = (("fp8_slow_accum", False),)  # as torch's `use_fast_accum`
# QuACK has its own, but with an entry for each number of tokens, which would never end.
_plans: Final[dict[tuple[Any, ...], Any]] = {}

# QuACK's own default is a folder in /tmp, from which it would load what anybody has put there.
if quack.cache.CACHE_DIR is None:
    folder = home_folder("quack")
    quack.cache.CACHE_DIR, quack.cache.CACHE_ENABLED = str(folder), os.access(folder, os.W_OK)
# It knows the epilogues of installed packages by their names alone, and kernels of another version have the same.
quack.cache.EXTRA_SOURCE_DIRS.append(Path(__file__).parent)


class _PairStore(TileStore):
    """The result of pairs of columns, also in fp8, which QuACK implements for Hopper and does not declare."""

    def to_params(self, gemm: Any, args: Any) -> Any:
        self.gated = False
        try:
            return super().to_params(gemm, args)
        finally:
            self.gated = True


def _gelu(x, half):
    """GELU times 2 `half`: x / 2 (1 + tanh(x p(x^2))), p fitted to the erf form, off by at most 3e-5 and 2^-12 of x."""
    square = fmin(x * x, 16.0)
    p = square * (square * -3.51516821e-4 + 3.70056454e-2) + 7.97507885e-1
    scaled = x * half
    return tanh(x * p) * scaled + scaled


_NORM = {"factor": ColVecLoad("factor"), "bias": RowVecLoad("bias")}
_SUMS = {"sums": ColVecReduce("sums"), "squares": ColVecReduce("squares", scaled=True)}
_RESIDUAL = {"bias": RowVecLoad("bias")}
_POST = {"gain": RowVecLoad("gain"), "rstd": ColVecLoad("rstd"), "mean_rstd": ColVecLoad("mean_rstd")}
_QUANTIZED = {"scale": ColVecLoad("scale")}


@gemm_epilogue(ops=_NORM)
def _normed(acc, factor, bias):
    return {"D": acc * factor + bias}


@gemm_epilogue(ops=_NORM)
def _normed_gelu(acc, factor, bias, half):
    return {"D": _gelu(acc * factor + bias, half)}


@gemm_epilogue(ops=_NORM, outputs=(_PairStore("inner", gated=True),), mode="acc_pair")
def _normed_glu(acc, factor, bias, half):
    gate, value = unpack(acc * factor + bias)
    return {"inner": _gelu(gate, half) * value}


@gemm_epilogue(ops=_RESIDUAL, reduces=_SUMS)
def _added(acc, c, bias):
    total = acc + (c + bias)
    return {"D": total, "sums": total, "squares": (total, total)}


@gemm_epilogue(ops=_RESIDUAL | _QUANTIZED, reduces=_SUMS, outputs=("quantized",))
def _added_fp8(acc, c, bias, alpha, scale):
    total = acc * alpha + (c + bias)
    return {"D": total, "sums": total, "squares": (total, total), "quantized": total * scale}


@gemm_epilogue(ops=_RESIDUAL | _POST, reduces=_SUMS)
def _added_post(acc, c, bias, gain, rstd, mean_rstd):
    total = acc + ((c * rstd - mean_rstd) * gain + bias)
    return {"D": total, "sums": total, "squares": (total, total)}


@gemm_epilogue(ops=_RESIDUAL | _POST | _QUANTIZED, reduces=_SUMS, outputs=("quantized",))
def _added_post_fp8(acc, c, bias, alpha, gain, rstd, mean_rstd, scale):
    total = acc * alpha + ((c * rstd - mean_rstd) * gain + bias)
    return {"D": total, "sums": total, "squares": (total, total), "quantized": total * scale}


def _columns(weight: Tensor, *widths: int) -> int:
    """The first of these widths of a tile of the product that divides its width, else 128; a tile has 128 rows."""
    return next((width for width in widths if not len(weight) % width), 128)


def _run(
    epilogue: Any, columns: int, x: Tensor, weight: Tensor, out: Tensor | None, residual: Tensor | None, **arguments: Any
) -> None:  # fmt: skip
    """Launches a product: two groups of warps alternate, one multiplies a tile while the other is in its epilogue."""
    key = epilogue, columns, x.dtype, x.device
    if key not in _plans:
        _plans[key] = epilogue.gemm(
            x, weight, out, residual, epi_args=arguments, tile_M=128, tile_N=columns, pingpong=True, cluster_M=2,
            cluster_N=1, post_init_attrs=_FAST_ACCUMULATION, _launch=False,
        )  # fmt: skip
    run_gemm_epi_plan(_plans[key], x, weight, out, residual, arguments)


def multiply_normed(operand: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product (T, O) after a LayerNorm, 16 bit: `operand` (T, I) by `weight` (O, I), its rows times `factor`, plus `bias`.

    `operand` and `weight` are fp16, bf16 or fp8 e4m3, for which the result is bf16.
    """
    dtype = torch.bfloat16 if operand.dtype == FP8 else operand.dtype
    out = operand.new_empty((len(operand), len(weight)), dtype=dtype)
    _run(_normed, _columns(weight, 192, 160), operand, weight, out, None, factor=factor, bias=bias)
    return out


def multiply_normed_gelu(
    operand: Tensor, factor: Tensor, weight: Tensor, bias: Tensor, *, gated: bool, out_factor: float
) -> Tensor:
    """GELU of the product after a LayerNorm, times `out_factor`, in the dtype of `operand`.

    Gated, GELU of its even columns is multiplied by the odd ones: (T, O / 2).
    """
    out = operand.new_empty((len(operand), len(weight) // 2 if gated else len(weight)))
    columns, half = _columns(weight, 160, 192), 0.5 * out_factor
    if gated:
        _run(
            _normed_glu, columns, operand, weight, None, None, inner=out, factor=factor, bias=bias, half=half
        )
    else:
        _run(_normed_gelu, columns, operand, weight, out, None, factor=factor, bias=bias, half=half)
    return out


def add_product(
    x: Tensor,
    weight: Tensor,
    alpha: float,
    residual: Tensor,
    bias: Tensor,
    *,
    post_norm: tuple[Tensor, Tensor, Tensor] | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Adds a product to `residual` (T, O), in place: `alpha` times `x` (T, I) by `weight` (O, I), plus `bias`.

    With `post_norm`, what is added to is the LayerNorm of `residual` but for its shift: its gain (1, O), and for each
    token the reciprocal of its standard deviation, and that times its mean. `x` and `weight` are 16 bit, of the dtype of `residual`
    and with `alpha` 1, or fp8 e4m3.

    Returns:
        Sums of the results of each token, and of their squares, fp32 (T, tiles of columns); in fp8 the results times `scale`
        (1, T), (T, O), else None.
    """
    columns = _columns(weight, 160)
    sums, squares = (bias.new_empty((len(x), -(-len(weight) // columns))) for _ in range(2))
    arguments: dict[str, Any] = {"bias": bias, "sums": sums, "squares": squares}
    if post_norm is not None:
        arguments |= zip(_POST, post_norm, strict=True)
    quantized = None
    if scale is not None:
        quantized = residual.new_empty(residual.shape, dtype=FP8)
        arguments |= {"alpha": alpha, "scale": scale, "quantized": quantized}
    of_post_norm = (_added_post, _added_post_fp8) if post_norm is not None else (_added, _added_fp8)
    _run(of_post_norm[scale is not None], columns, x, weight, residual, residual, **arguments)
    return sums, squares, quantized
