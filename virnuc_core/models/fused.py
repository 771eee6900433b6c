"""Matrix products of a layer and what follows them, fused as far as the device can.

    CPU     oneDNN multiplies and applies what follows in one pass, through the operator that torch.compile
            uses there too. torch's own fp32 path hands the product to MKL, which takes 2.3 times as long on
            AMD processors and never fuses.
    CUDA    in 16 bit and fp8 one Triton kernel does all that lies between two products. cuBLAS multiplies,
            except for the first product of a feed-forward layer on Hopper and later, which takes in its
            activation.
    else    plain torch, which also serves training.

Shapes: T tokens, I and O a linear layer's input and output width, D width of the hidden states.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.models.fp8 import Fp8Linear, Quantised
from virnuc_core.models.kernels import has_kernels, has_product_kernel

_HAS_ONEDNN: Final = torch.backends.mkldnn.is_available()
_ALIGNMENT: Final = 8  # of the input width, for the copy engine


class AlternatingGate(nn.Module):
    """The bias-free first layer of a gated feed-forward, with rows of gate and value in turn.

    Attributes:
        weight: (2 F, I).
    """

    weight: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        gate, value = layer.weight.detach().chunk(2)
        self.register_buffer("weight", torch.stack((gate, value), dim=1).flatten(0, 1))


Linear = nn.Linear | Fp8Linear
ProductInput = Tensor | Quantised


def arrange_gate(layer: nn.Linear) -> nn.Linear | AlternatingGate:
    """The first layer of a gated feed-forward as the device multiplies it fastest; for inference only."""
    return AlternatingGate(layer) if _fuses_activation(layer, layer.weight) else layer


def linear(layer: Linear, x: ProductInput) -> Tensor:
    """(T, I) -> (T, O)."""
    if isinstance(layer, Fp8Linear):
        product: Tensor = layer(_quantised(x))
        return product
    assert isinstance(x, Tensor)
    if _fuses_on_cpu(x):
        return _onednn_linear(x, layer.weight, layer.bias, "none")
    return functional.linear(x, layer.weight, layer.bias)


def linear_gelu(layer: Linear, x: ProductInput, feeds: nn.Module) -> ProductInput:
    """(T, I) -> (T, O), GELU in its exact (erf) form on the result, as the layer `feeds` takes it."""
    if isinstance(layer, Fp8Linear):
        return _activate(layer.product(_quantised(x)), layer.bias, "gelu", feeds)
    assert isinstance(x, Tensor)
    if _fuses_on_cpu(x):
        return _onednn_linear(x, layer.weight, layer.bias, "gelu")
    if _fuses_activation(layer, x) and not torch.is_grad_enabled():
        fused: Tensor = torch.ops.virnuc.linear_gelu(x, layer.weight, layer.bias, False)
        return fused
    y = functional.linear(x, layer.weight, layer.bias)
    return _activate(y, None, "gelu", feeds) if _has_kernels(y) else functional.gelu(y)


def linear_gated_gelu(layer: Linear | AlternatingGate, x: ProductInput, feeds: nn.Module) -> ProductInput:
    """(T, I) -> (T, O / 2): GELU of the first half of a bias-free layer's output times the second half."""
    if isinstance(layer, Fp8Linear):
        return _activate(layer.product(_quantised(x)), None, "gated_gelu", feeds)
    assert isinstance(x, Tensor)
    if isinstance(layer, AlternatingGate):
        fused: Tensor = torch.ops.virnuc.linear_gelu(x, layer.weight, None, True)
        return fused
    if _fuses_on_cpu(x):
        gate_weight, value_weight = layer.weight.chunk(2)
        gate = _onednn_linear(x, gate_weight, None, "gelu")
        return _onednn_binary(x, gate, value_weight, None, "mul")
    y = functional.linear(x, layer.weight)
    if _has_kernels(y):
        return _activate(y, None, "gated_gelu", feeds)
    gate, value = y.chunk(2, dim=-1)
    return functional.gelu(gate) * value


def linear_add_norm(
    layer: Linear,
    x: ProductInput,
    residual: Tensor,
    norm: nn.LayerNorm,
    feeds: nn.Module | None,
    *,
    normed_residual: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, ProductInput]:
    """The end of a branch: its last product, the residual, and the LayerNorm that comes next.

    Args:
        layer: the branch's last layer, I -> D.
        x: (T, I).
        residual: (T, D), what the branch is added to.
        norm: the next LayerNorm.
        feeds: the layer that takes the LayerNorm; None when it is a result.
        normed_residual: whether the next branch is added to the LayerNorm (post-norm) or to the sum (pre-norm).
        dropout: share of the branch's output to drop; 0 outside training.

    Returns:
        What the next branch is added to, (T, D), and the LayerNorm as `feeds` takes it.
    """
    if isinstance(layer, Fp8Linear):
        branch = layer.product(_quantised(x))
        return _add_norm(branch, layer.bias, residual, norm, feeds, normed_residual)
    assert isinstance(x, Tensor)
    if _fuses_on_cpu(x):
        total = _onednn_binary(x, residual, layer.weight, layer.bias, "add")
    else:
        branch = functional.linear(x, layer.weight, layer.bias)
        if _has_kernels(branch):
            return _add_norm(branch, None, residual, norm, feeds, normed_residual)
        total = residual + functional.dropout(branch, dropout)
    normed = norm(total)
    return (normed if normed_residual else total), normed


def layer_norm(
    norm: nn.LayerNorm, x: Tensor, feeds: nn.Module, shift: Tensor | None = None
) -> tuple[Tensor, ProductInput]:
    """LayerNorm of x (T, D) plus a shift (D,), in the dtype of x and as `feeds` takes it."""
    if _has_kernels(x):
        return _add_norm(None, shift, x, norm, feeds, True)
    normed = norm(x if shift is None else x + shift)
    return normed, normed


def _add_norm(
    branch: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    norm: nn.LayerNorm,
    feeds: nn.Module | None,
    normed_residual: bool,
) -> tuple[Tensor, ProductInput]:
    quantise = isinstance(feeds, Fp8Linear)
    total, normed, values, scale = torch.ops.virnuc.add_norm(
        branch,
        bias,
        residual,
        norm.weight,
        norm.bias,
        norm.eps,
        not normed_residual,
        normed_residual or not quantise,
        quantise,
    )
    return (normed if normed_residual else total), (Quantised(values, scale) if quantise else normed)


def _activate(x: Tensor, bias: Tensor | None, activation: str, feeds: nn.Module) -> ProductInput:
    quantise = isinstance(feeds, Fp8Linear)
    values, scale = torch.ops.virnuc.activate(x, bias, activation, quantise)
    return Quantised(values, scale) if quantise else values


def _quantised(x: ProductInput) -> Quantised:
    return x if isinstance(x, Quantised) else Quantised(*torch.ops.virnuc.activate(x, None, "none", True))


def _has_kernels(x: Tensor) -> bool:
    return _is_half_on_cuda(x) and has_kernels(x.device) and not torch.is_grad_enabled()


def _fuses_activation(layer: nn.Linear, x: Tensor) -> bool:
    return _is_half_on_cuda(x) and has_product_kernel(x.device) and not layer.in_features % _ALIGNMENT


def _is_half_on_cuda(x: Tensor) -> bool:
    return x.is_cuda and (x.dtype == torch.float16 or x.dtype == torch.bfloat16)


def _fuses_on_cpu(x: Tensor) -> bool:
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _HAS_ONEDNN:
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return x.dtype == torch.float32


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")
    return result


def _onednn_binary(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, operation: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)
    return result
