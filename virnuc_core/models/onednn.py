"""Linear layers on the CPU: oneDNN on weights in its own blocked order, through the operators that torch.compile uses too.

torch's own fp32 path calls MKL, which takes 2.3 times as long on AMD processors and never fuses. Packed once, a weight
need not be reordered in every product; results are the same bits.

Shapes: T tokens, I and O a linear layer's input and output width.
"""

from typing import Final, Literal

import torch
from torch import Tensor, nn

_HAS_ONEDNN: Final = torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """A linear layer whose `weight` only oneDNN can read; for inference only."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.register_buffer("weight", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

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
    """The bias-free first layer of a gated feed-forward as two layers, both packed by `pack_layers`."""

    gate: PackedLinear
    value: PackedLinear

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        for name, weight in zip(("gate", "value"), layer.weight.detach().chunk(2), strict=True):
            half = nn.Linear(layer.in_features, len(weight), bias=False, device="meta")
            half.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, half)


def pack_layers(model: nn.Module) -> None:
    """Packs the linear layers of a model in place if it is on a CPU where oneDNN computes in its dtype."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and can_pack(layer.weight):
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight at full speed."""
    if weight.device.type != "cpu" or not _HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
