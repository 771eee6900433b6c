"""Matrix products of a layer and what follows them, fused as far as the device allows.

    CPU     oneDNN fuses the product with what follows, on weights that are packed when a model is loaded.
    CUDA    in 16 bit and fp8 one Triton kernel does everything between two products. cuBLAS multiplies, except for the
            first product of a feed-forward layer, which is fused with its activation.
    else    plain torch, also for training.

fp8 (e4m3) has one scale per row of weights. LayerNorms have one per row, too; what follows them, attention and
activation, has one scale for all, from the largest value that a product of a LayerNorm can have.

Shapes: T tokens, I and O a linear layer's input and output width, D width of the hidden states.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.errors import UsageError
from virnuc_core.models.kernels import has_kernels

_FP8_MAX: Final = 448.0  # the largest finite e4m3


class Quantized(NamedTuple):
    """A matrix in fp8: `values` e4m3 (T, I), and `scale` fp32 (T, 1) to multiply its rows by."""

    values: Tensor
    scale: Tensor


GemmInput = Tensor | Quantized


def quantize_rows(matrix: Tensor) -> Quantized:
    """fp32 (R, C) to fp8, scaled row by row so that the largest magnitude of each becomes the largest finite e4m3."""
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return Quantized((matrix / scale).to(torch.float8_e4m3fn), scale)


class Fp8Linear(nn.Module):
    """A linear layer in fp8: weight e4m3 (O, I), scale fp32 (1, O), bias (O,) in the model's dtype.

    `input_scale`, fp32 (1, 1), is what inputs that come without scales were divided by.

    Raises:
        UsageError: tensor cores do not take the widths in fp8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, input_scale: Tensor) -> None:
        super().__init__()
        if any(width % 16 for width in weight.shape):
            raise UsageError(
                f"fp8 needs model widths that are multiples of 16, not {' x '.join(map(str, weight.shape))}: use --precision bf16"
            )
        values, scale = quantize_rows(weight.detach().float())
        self.weight, self.scale = nn.Buffer(values), nn.Buffer(scale.t().contiguous())
        self.bias = None if bias is None else nn.Buffer(bias.detach())
        self.input_scale = nn.Buffer(input_scale.detach().view(1, 1))

    def matmul(self, x: GemmInput, bias: Tensor | None) -> Tensor:
        """(T, I) -> (T, O), bf16; leave the bias to the kernel that follows, which adds it at no cost."""
        if isinstance(x, Tensor):
            x = Quantized(x, self.input_scale.expand(len(x), 1).contiguous())
        result: Tensor = torch._scaled_mm(
            x.values,
            self.weight.t(),
            scale_a=x.scale,
            scale_b=self.scale,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return result


def quantize_attention(norm: nn.LayerNorm, qkv: nn.Linear, out: nn.Linear) -> tuple[Fp8Linear, Fp8Linear]:
    """The products before and after attention in fp8; `qkv` takes `norm`.

    Attention averages values. They are divided by the largest possible one beforehand, in their weights.
    """
    scale = output_bounds(norm, qkv).chunk(3)[2].max() / _FP8_MAX
    factors = torch.ones(qkv.out_features, device=scale.device)
    factors[-qkv.out_features // 3 :] /= scale
    weight = qkv.weight.float() * factors[:, None]
    bias = (qkv.bias.float() * factors).to(qkv.bias.dtype)
    return Fp8Linear(weight, bias, torch.ones_like(scale)), Fp8Linear(out.weight, out.bias, scale)


def quantize_feed_forward(
    norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear, *, gated: bool
) -> tuple[Fp8Linear, Fp8Linear]:
    """The products of a feed-forward layer, which takes `norm`, in fp8; GELU makes no value larger."""
    bounds, weight = output_bounds(norm, first), first.weight
    if gated:
        gate, value = bounds.chunk(2)
        bounds = gate * value
        weight = _interleave(weight)
    scale = bounds.max() / _FP8_MAX
    return Fp8Linear(weight, first.bias, torch.ones_like(scale)), Fp8Linear(second.weight, second.bias, scale)


def output_bounds(norm: nn.LayerNorm, layer: nn.Linear) -> Tensor:
    """The largest magnitude that each output of `layer` can have where its input is `norm`, fp32 (O,).

    Before gain and shift a LayerNorm is a vector of length sqrt(D) at most, which bounds its product with any row.
    """
    weight = layer.weight.detach().float()
    shift = weight @ norm.bias.float()
    if layer.bias is not None:
        shift += layer.bias.float()
    bounds: Tensor = (weight * norm.weight.float()).norm(dim=1) * layer.in_features**0.5 + shift.abs()
    return bounds


class InterleavedGLU(nn.Module):
    """The bias-free first layer of a gated feed-forward; rows of gate and value alternate in `weight` (2 F, I)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(_interleave(layer.weight.detach()))


def _interleave(weight: Tensor) -> Tensor:
    """The rows of the first and the second half in turn."""
    return torch.stack(weight.chunk(2), dim=1).flatten(0, 1)


class OnednnLinear(nn.Module):
    """A linear layer on the CPU, in its dtype, with weights in oneDNN's blocked order, which nothing else can read.

    Product, bias, GELU and residual are one operator. torch's own fp32 path calls MKL, which takes 2.3 times as long on
    AMD processors and never fuses. Packed once, a weight need not be reordered in every product; results are the same
    bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()))
        self.bias = None if bias is None else nn.Buffer(bias.detach())

    def multiply(self, x: Tensor, activation: Literal["none", "gelu"]) -> Tensor:
        """(T, I) -> (T, O), with exact (erf) GELU if so asked."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, activation, [], "none"
        )
        return product

    def multiply_with(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        """(T, I) -> (T, O), added to or multiplied by `other` (T, O)."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.weight, self.bias, operation
        )
        return product


class SplitGLU(nn.Module):
    """The bias-free first layer of a gated feed-forward as two layers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.gate, self.value = (OnednnLinear(half, None) for half in layer.weight.chunk(2))


class InPlaceLinear(nn.Module):
    """A linear layer whose product is added to the residual in place, for inference only: LayerNorm reads one matrix less.

    `shift`, fp32 (O,), is its bias plus `shift_before`, which the residual lacks.
    """

    def __init__(self, layer: nn.Linear, shift_before: Tensor) -> None:
        super().__init__()
        self.weight = nn.Buffer(layer.weight.detach())
        self.shift = nn.Buffer(shift_before + layer.bias.detach().float())


def pack_layers(model: nn.Module) -> None:
    """Packs the linear layers of a model in place if it is on a CPU where oneDNN computes in its dtype."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and can_pack(layer.weight):
                setattr(parent, name, OnednnLinear(layer.weight, layer.bias))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight at full speed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


Linear = nn.Linear | Fp8Linear | OnednnLinear


def arrange_glu(layer: nn.Linear) -> nn.Linear | InterleavedGLU | SplitGLU:
    """The first layer of a gated feed-forward as the kernel of its device takes it; for inference only."""
    if can_pack(layer.weight):
        return SplitGLU(layer)
    return InterleavedGLU(layer) if _fuses_activation(layer, layer.weight) else layer


def linear(layer: Linear, x: GemmInput) -> Tensor:
    """(T, I) -> (T, O)."""
    if isinstance(layer, Fp8Linear):
        return layer.matmul(x, layer.bias)
    assert isinstance(x, Tensor)
    if isinstance(layer, OnednnLinear):
        return layer.multiply(x, "none")
    return functional.linear(x, layer.weight, layer.bias)


def linear_gelu(
    layer: Linear | InterleavedGLU | SplitGLU, x: GemmInput, next_linear: nn.Module, *, gated: bool
) -> GemmInput:
    """(T, I) -> (T, F): GELU of the product; or, gated, GELU of its first half times the second half, without a bias.

    The result is in the form that `next_linear` takes. GELU has its erf form, in fp8 the tanh form.
    """
    if isinstance(layer, Fp8Linear):
        assert isinstance(x, Quantized)
        assert isinstance(next_linear, Fp8Linear)
        scales = (x.scale, layer.scale, next_linear.input_scale)
        return _fused_gelu(x.values, layer.weight, layer.bias, gated, scales)
    assert isinstance(x, Tensor)
    if isinstance(layer, OnednnLinear):
        return layer.multiply(x, "gelu")
    if isinstance(layer, SplitGLU):
        return layer.value.multiply_with(x, layer.gate.multiply(x, "gelu"), "mul")
    if isinstance(layer, InterleavedGLU):
        return _fused_gelu(x, layer.weight, None, gated)
    if not gated and _fuses_activation(layer, x):
        return _fused_gelu(x, layer.weight, layer.bias, gated)
    product = functional.linear(x, layer.weight, layer.bias)
    if not gated:
        return functional.gelu(product)
    gate, value = product.chunk(2, dim=-1)
    return functional.gelu(gate) * value


def linear_add_norm(
    layer: Linear | InPlaceLinear,
    x: GemmInput,
    residual: Tensor,
    norm: nn.LayerNorm,
    next_linear: nn.Module | None,
    *,
    post_norm: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, GemmInput]:
    """The end of a branch: its last product, the residual connection, and the next LayerNorm.

    `x` is (T, I), `residual` (T, D); `next_linear` takes the LayerNorm, None if that is a result. Returns what the
    next branch is added to, (T, D), which is the LayerNorm with `post_norm` and else the sum, but for the shift of an
    `InPlaceLinear`; and the LayerNorm in the form that `next_linear` takes. `dropout` must be 0 outside training.
    """
    if isinstance(layer, Fp8Linear):
        branch = layer.matmul(x, None)
        return _add_norm(branch, layer.bias, residual, norm, next_linear, post_norm)
    assert isinstance(x, Tensor)
    if isinstance(layer, InPlaceLinear):
        return _add_norm(None, layer.shift, residual.addmm_(x, layer.weight.t()), norm, next_linear, False)
    if isinstance(layer, OnednnLinear):
        total = layer.multiply_with(x, residual, "add")
    else:
        branch = functional.linear(x, layer.weight, layer.bias)
        if has_half_kernels(branch):
            return _add_norm(branch, None, residual, norm, next_linear, post_norm)
        total = residual + functional.dropout(branch, dropout)
    normed = norm(total)
    return (normed if post_norm else total), normed


def layer_norm(
    norm: nn.LayerNorm, x: Tensor, next_linear: nn.Module, shift: Tensor | None = None
) -> tuple[Tensor, GemmInput]:
    """LayerNorm of x (T, D) plus a shift (D,), in the dtype of x and in the form that `next_linear` takes."""
    if has_half_kernels(x):
        return _add_norm(None, shift, x, norm, next_linear, True)
    normed = norm(x if shift is None else x + shift)
    return normed, normed


def _add_norm(
    branch: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    norm: nn.LayerNorm,
    next_linear: nn.Module | None,
    post_norm: bool,
) -> tuple[Tensor, GemmInput]:
    from virnuc_core.models.kernels.rowwise import add_norm

    in_fp8 = isinstance(next_linear, Fp8Linear)
    kept, normed, scale = add_norm(
        branch, bias, residual, norm.weight, norm.bias, norm.eps, post_norm=post_norm, quantize=in_fp8
    )
    return kept, normed if scale is None else Quantized(normed, scale)


def _fused_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    from virnuc_core.models.kernels.gemm_gelu import linear_gelu

    return linear_gelu(x, weight, bias, gated, scales)


def has_half_kernels(x: Tensor) -> bool:
    """Whether the kernels for 16 bit apply to a tensor."""
    is_half = x.dtype == torch.float16 or x.dtype == torch.bfloat16
    return is_half and has_kernels(x.device) and not torch.is_grad_enabled()


def _fuses_activation(layer: nn.Linear, x: Tensor) -> bool:
    # The kernel loads 16 bytes at once.
    return has_half_kernels(x) and not layer.in_features % 8
