"""The layers of both models as four matrix products each, with everything between these in their epilogues.

LayerNorm(x) W^T + b equals rstd * x V^T + c, where V is W with its columns times the gain and then each row less its mean,
which takes no notice of the mean of x, and c = W shift + b. So a product takes the sums of a residual connection as they are,
and `rstd` from what the product before has summed up by the way. This needs QuACK and a Hopper GPU.

In fp8 (e4m3), a matrix of weights has one scale. Sums are scaled so that the standard deviation of the token's last ones
becomes 1/16: they saturate where a branch makes them 7,000 times as large. Attention and activation have one scale for all
tokens, from the largest value that a product of a LayerNorm can have.

Shapes: T tokens, D width of the hidden states, I and O input and output width of a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from virnuc_core.models.attention import PackedLayout, packed_attention
from virnuc_core.models.layers import interleave

_FP8_MAX: Final = 448.0  # the largest finite e4m3
_UNIT: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a residual connection, before LayerNorm.

    Attributes:
        values: 16 bit (T, D).
        operand: what the next product multiplies, (T, D): the values, or these in fp8 with a scale for each token.
        factor: what it multiplies its rows by, fp32 (1, T).
        rstd: reciprocal of the standard deviation, fp32 (1, T).
        mean_rstd: the mean times it, fp32 (1, T).
        scale: what the next sums are multiplied by in fp8, fp32 (1, T), else None.
    """

    values: Tensor
    operand: Tensor
    factor: Tensor
    rstd: Tensor
    mean_rstd: Tensor
    scale: Tensor | None


class Product(nn.Module):
    """Weights (O, I) in 16 bit or e4m3, and bias fp32 (1, O).

    `alpha` is what a product in fp8 is multiplied by. `gain`, fp32 (1, O), is that of the LayerNorm that the product is added to
    (post-norm), else None.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, dtype: torch.dtype, alpha: float = 1.0, gain: Tensor | None = None
    ) -> None:
        super().__init__()
        if dtype == torch.float8_e4m3fn:
            scale = weight.abs().max().item() / _FP8_MAX or 1.0
            weight, alpha = weight / scale, scale * alpha
        self.alpha = alpha
        self.weight = nn.Buffer(weight.to(dtype))
        self.bias = nn.Buffer(bias.view(1, -1))
        self.gain = None if gain is None else nn.Buffer(gain.float().view(1, -1))


def after_norm(norm: nn.LayerNorm, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """V (O, D) and c (O,), fp32, of a linear layer that takes `norm`."""
    weight = layer.weight.float()
    bias = weight @ norm.bias.float()
    if layer.bias is not None:
        bias += layer.bias.float()
    weight = weight * norm.weight.float()
    weight -= weight.mean(dim=1, keepdim=True)
    return weight, bias


def output_bounds(weight: Tensor, bias: Tensor) -> Tensor:
    """The largest magnitude that each output can have of a layer with V and c, fp32 (O,).

    Before gain and shift a LayerNorm is a vector of length sqrt(D) at most, which bounds its product with any row.
    """
    bounds: Tensor = weight.norm(dim=1) * weight.shape[1] ** 0.5 + bias.abs()
    return bounds


def _qkv_product(norm: nn.LayerNorm, layer: nn.Linear, dtype: torch.dtype) -> tuple[Product, float]:
    """The product for attention, which averages values; in fp8 they are divided such that the largest possible one is 448.

    Also returns the largest before that.
    """
    weight, bias = after_norm(norm, layer)
    largest = _FP8_MAX
    if dtype == torch.float8_e4m3fn:
        bounds = output_bounds(weight, bias).chunk(3)[2]
        largest = bounds.max().item()
        weight[-len(bounds) :] *= _FP8_MAX / largest
        bias[-len(bounds) :] *= _FP8_MAX / largest
    return Product(weight, bias, dtype), largest


def _ffn_product(
    norm: nn.LayerNorm, layer: nn.Linear, dtype: torch.dtype, *, gated: bool
) -> tuple[Product, float]:
    """The first product of a feed-forward layer, and in fp8 the largest value that its activation can give."""
    weight, bias = after_norm(norm, layer)
    largest = _FP8_MAX
    if dtype == torch.float8_e4m3fn:
        bounds = output_bounds(weight, bias)
        if gated:
            gate, value = bounds.chunk(2)
            bounds = gate * value
        largest = bounds.max().item()  # GELU makes no value larger
    if gated:
        weight, bias = interleave(weight), interleave(bias)
    return Product(weight, bias, dtype), largest


def _last_product(norm: nn.LayerNorm | None, layer: nn.Linear, dtype: torch.dtype, largest: float) -> Product:
    """The product that ends a branch, whose input in fp8 was divided by `largest` / 448.

    What it is added to is LayerNorm `norm` of the sums, whose shift the bias takes up, or the sums themselves.
    """
    bias, gain = layer.bias.float(), None
    if norm is not None:
        bias, gain = bias + norm.bias.float(), norm.weight
    return Product(layer.weight.float(), bias, dtype, largest / _FP8_MAX, gain)


class FusedLayer(nn.Module):
    """A layer made of an `encoders.Layer` whose input is normalised by `norm`, with products in `dtype`."""

    def __init__(self, layer: Any, norm: nn.LayerNorm, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.is_gated, self.eps = layer.num_heads, layer.is_gated, norm.eps
        self.ffn_norm = layer.ffn_norm
        before, middle = (norm, layer.middle_norm) if self.is_gated else (None, None)
        self.qkv, largest = _qkv_product(norm, layer.qkv, dtype)
        self.attention_out = _last_product(before, layer.attention_out, dtype, largest)
        self.ffn_in, largest = _ffn_product(layer.middle_norm, layer.ffn_in, dtype, gated=self.is_gated)
        self.inner_factor = _FP8_MAX / largest
        self.ffn_out = _last_product(middle, layer.ffn_out, dtype, largest)

    def forward(self, sums: Sums, layout: PackedLayout, next_alpha: float) -> Sums:
        """The sums before this layer -> those after it; `next_alpha` is of the product that takes them."""
        sums = self._add(sums, self._attend(sums, layout), self.attention_out, self.ffn_in.alpha)
        return self._add(sums, self._activate(sums), self.ffn_out, next_alpha)

    def _attend(self, sums: Sums, layout: PackedLayout) -> Tensor:
        from virnuc_core.models.kernels.products import multiply_normed

        qkv = multiply_normed(sums.operand, sums.factor, self.qkv.weight, self.qkv.bias)
        heads = qkv.unflatten(1, (3, self.num_heads, -1))
        return packed_attention(heads, layout, quantize=sums.scale is not None)

    def _activate(self, sums: Sums) -> Tensor:
        from virnuc_core.models.kernels.products import multiply_normed_gelu

        weight, bias, factor = self.ffn_in.weight, self.ffn_in.bias, self.inner_factor
        return multiply_normed_gelu(
            sums.operand, sums.factor, weight, bias, gated=self.is_gated, out_factor=factor
        )

    def _add(self, sums: Sums, x: Tensor, product: Product, next_alpha: float) -> Sums:
        from virnuc_core.models.kernels.products import add_product

        post_norm = None if product.gain is None else (product.gain, sums.rstd, sums.mean_rstd)
        parts, squares, quantized = add_product(
            x, product.weight, product.alpha, sums.values, product.bias, post_norm=post_norm, scale=sums.scale
        )
        return _sum_up(sums.values, self.eps, next_alpha, sums.scale, parts, squares, quantized)


def _sum_up(
    values: Tensor,
    eps: float,
    alpha: float,
    scale: Tensor | None,
    parts: Tensor | None = None,
    squares: Tensor | None = None,
    quantized: Tensor | None = None,
) -> Sums:
    """`values` for a product with `alpha`, from sums of parts of them and of their squares if there are; overwrites `scale`."""
    from virnuc_core.models.kernels.rowwise import norm_factors

    summed = values if parts is None else parts
    factor, rstd, mean_rstd, own = norm_factors(
        summed, squares, values.shape[1], eps, scale=scale, alpha=alpha, unit=_UNIT
    )
    operand = next(operand for operand in (quantized, own, values) if operand is not None)
    return Sums(values, operand, factor, rstd, mean_rstd, scale)


def run_layers(layers: Sequence[FusedLayer], values: Tensor, layout: PackedLayout) -> Tensor:
    """The sums (T, D) after these layers, before any LayerNorm, from those before them; overwrites `values`."""
    if not layers:
        return values
    scale = None
    if layers[0].qkv.weight.dtype == torch.float8_e4m3fn:
        scale = values.new_empty((1, len(values)), dtype=torch.float32)
    alphas = [layer.qkv.alpha for layer in layers] + [1.0]
    sums = _sum_up(values, layers[0].eps, alphas[0], scale)
    for layer, next_alpha in zip(layers, alphas[1:], strict=True):
        sums = layer(sums, layout, next_alpha)
    return sums.values
