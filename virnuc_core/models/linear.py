"""The one door to a Linear layer and what follows it: GELU, a gate, or the residual.

On the CPU, without gradients, oneDNN multiplies and applies what follows in one pass, through the operator
that torch.compile uses there too. torch's own fp32 path hands the product to MKL, which takes 2.3 times as
long on AMD processors and never fuses. Everywhere else it is plain torch.

Shapes: T tokens, I and O the layer's input and output width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """(T, I) -> (T, O)."""
    if _fuses(x):
        return _fused_linear(x, layer.weight, layer.bias, "none")
    return functional.linear(x, layer.weight, layer.bias)


def linear_gelu(layer: nn.Linear, x: Tensor) -> Tensor:
    """(T, I) -> (T, O), GELU in its exact (erf) form on the result."""
    if _fuses(x):
        return _fused_linear(x, layer.weight, layer.bias, "gelu")
    return functional.gelu(functional.linear(x, layer.weight, layer.bias))


def linear_gated_gelu(layer: nn.Linear, x: Tensor) -> Tensor:
    """(T, I) -> (T, O / 2): GELU of the first half of a bias-free layer's output times the second half."""
    if _fuses(x):
        gate_weight, value_weight = layer.weight.chunk(2)
        gate = _fused_linear(x, gate_weight, None, "gelu")
        return _fused_binary(x, gate, value_weight, None, "mul")
    gate, value = functional.linear(x, layer.weight).chunk(2, dim=-1)
    return functional.gelu(gate) * value


def linear_residual(layer: nn.Linear, x: Tensor, residual: Tensor, dropout: float = 0.0) -> Tensor:
    """(T, I) and the residual (T, O) -> (T, O), their sum.

    Args:
        layer: the branch's last layer.
        x: the branch's values.
        residual: what the branch is added to.
        dropout: share of the branch's output to drop; 0 outside training.
    """
    if _fuses(x):
        return _fused_binary(x, residual, layer.weight, layer.bias, "add")
    branch = functional.linear(x, layer.weight, layer.bias)
    return residual + functional.dropout(branch, dropout)


def _fuses(x: Tensor) -> bool:
    if x.device.type != "cpu" or torch.is_grad_enabled() or not torch.backends.mkldnn.is_available():
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return x.dtype == torch.float32


def _fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")
    return result


def _fused_binary(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, operation: str) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)
    return result
