"""Matrix products in fp8 (e4m3), with one scale for each row of activations and each row of weights.

Shapes: T tokens, I and O a linear layer's input and output width.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

_FP8: Final = torch.float8_e4m3fn
_HIGHEST: Final = 448.0  # the largest finite e4m3
_SMALLEST_ROW: Final = 1e-12
_ALIGNMENT: Final = 16  # of both widths, for the tensor cores


class Quantised(NamedTuple):
    """A matrix in fp8: `values` e4m3 (T, I), and `scale` fp32 (T, 1) to multiply its rows by."""

    values: Tensor
    scale: Tensor


def quantise_rows(matrix: Tensor) -> Quantised:
    """Each row over its own scale, so that its largest value becomes the largest of e4m3.

    Args:
        matrix: fp32 (R, C).

    Returns:
        e4m3 (R, C) and fp32 (R, 1).
    """
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST_ROW) / _HIGHEST
    return Quantised((matrix / scale).to(_FP8), scale)


class Fp8Linear(nn.Module):
    """A linear layer whose weights were quantised row by row.

    Attributes:
        weight: e4m3 (O, I).
        scale: fp32 (1, O).
        bias: (O,) in the model's dtype, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantise_rows(layer.weight.detach().float())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Quantised) -> Tensor:
        """(T, I) -> (T, O), bf16, bias included."""
        return self._multiply(x, self.bias)

    def product(self, x: Quantised) -> Tensor:
        """(T, I) -> (T, O), bf16, without the bias, which the next kernel adds at no cost."""
        return self._multiply(x, None)

    def _multiply(self, x: Quantised, bias: Tensor | None) -> Tensor:
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


def quantise_layers(model: nn.Module) -> None:
    """Replaces every linear layer of a bf16 model by its fp8 form, in place.

    Layers whose widths the tensor cores cannot take stay as they are.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and not (layer.in_features | layer.out_features) % _ALIGNMENT:
                setattr(parent, name, Fp8Linear(layer))
