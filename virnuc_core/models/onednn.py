"""Linear layers on the CPU: oneDNN on weights in its own blocked order, through the operators that torch.compile uses too.

    fp32, bf16   product, bias, GELU and residual are one operator. torch's own fp32 path calls MKL, which takes 2.3 times as
                 long on AMD processors and never fuses. Packed once, a weight need not be reordered in every product;
                 results are the same bits.
    int8         activations in 8 bit with scale and offset of each row, so that no sequence depends on its batch; weights in
                 8 bit with a scale of each output channel. Input channels far above the others, which would leave those few
                 steps, are divided by a power of two that their weights are multiplied by (as in SmoothQuant).

Shapes: T tokens, I and O a linear layer's input and output width.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_HAS_ONEDNN: Final = torch.backends.mkldnn.is_available()
_INT8_MAX: Final = 127.0
_MIN_ROW_MAX: Final = 1e-12
# The operator that quantises rows appends scale and offset of each, both fp32, to its bytes.
_FLOATS: Final = 2
_FLOAT_BYTES: Final = 4
_BLOCK_ROWS: Final = 256  # of int8, for each thread: what follows a product finds it in the cache

Activation = Literal["none", "gelu"]
Layer = TypeVar("Layer", bound=nn.Module)


class OnednnLinear(nn.Module):
    """A linear layer with weights in a form for oneDNN; for inference only."""

    @abstractmethod
    def multiply(self, x: Tensor, activation: Activation) -> Tensor:
        """(T, I) -> (T, O), with exact (erf) GELU if so asked."""

    @abstractmethod
    def multiply_with(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        """(T, I) -> (T, O), added to or multiplied by `other` (T, O)."""


class PackedLinear(OnednnLinear):
    """In fp32 or bf16, that of the layer; only oneDNN can read `weight`."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous())
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def multiply(self, x: Tensor, activation: Activation) -> Tensor:
        """See `OnednnLinear.multiply`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, activation, [], "none"
        )
        return product

    def multiply_with(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        """See `OnednnLinear.multiply_with`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.weight, self.bias, operation
        )
        return product


class Int8Linear(OnednnLinear):
    """In int8, from and to fp32: y = scale_t * (q_t W)_o * scale_o + offset_t * sums_o + bias_o.

    `magnitudes` are root mean squares of the input channels as shares of the largest value of each row, (I,).
    """

    weight: Tensor
    scale: Tensor
    zero_points: Tensor
    sums: Tensor
    bias: Tensor
    shrink: Tensor | None

    def __init__(self, layer: nn.Linear, magnitudes: Tensor) -> None:
        super().__init__()
        excess = (magnitudes / magnitudes.median().clamp(min=_MIN_ROW_MAX)).clamp(min=1.0)
        growth = torch.exp2((excess.log2() / 2).floor())
        weight = layer.weight.detach() * growth
        scale = weight.abs().amax(dim=1).clamp(min=_MIN_ROW_MAX) / _INT8_MAX
        quantized = (weight / scale[:, None]).round()
        # Scale and offset at the end of a quantised row are multiplied by zeros, instead of being cut off.
        padded = functional.pad(quantized, (0, _FLOATS * _FLOAT_BYTES)).to(torch.int8)
        self.register_buffer("weight", torch.ops.onednn.qlinear_prepack(padded, None))
        self.register_buffer("scale", scale)
        self.register_buffer("zero_points", torch.zeros(len(scale), dtype=torch.int32))
        self.register_buffer("sums", quantized.sum(dim=1) * scale)
        self.register_buffer("bias", torch.zeros_like(scale) if layer.bias is None else layer.bias.detach())
        self.register_buffer("shrink", None if (growth == 1).all() else 1 / growth)

    def multiply(self, x: Tensor, activation: Activation) -> Tensor:
        """See `OnednnLinear.multiply`."""
        result = x.new_empty(len(x), len(self.scale))
        block = _BLOCK_ROWS * torch.get_num_threads()
        for rows, part in zip(x.split(block), result.split(block), strict=True):
            quantized = quantize_rows_uint8(rows if self.shrink is None else rows * self.shrink)
            scale, offset = quantized.view(torch.float32)[:, -_FLOATS:].split(1, dim=1)
            torch.addcmul(self.bias, offset, self.sums, out=part).addcmul_(self.product(quantized), scale)
            if activation == "gelu":
                torch.ops.aten.gelu_(part)
        return result

    def product(self, quantized: Tensor) -> Tensor:
        """Rows of `quantize_rows_uint8` (T, I + 8) -> (T, O), fp32, without scale and offset of the rows."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized,
            1.0,
            0,
            self.weight,
            self.scale,
            self.zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product

    def multiply_with(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        """See `OnednnLinear.multiply_with`."""
        product = self.multiply(x, "none")
        return product.add_(other) if operation == "add" else product.mul_(other)


class _Observer(PackedLinear):
    """In fp32, keeping what `Int8Linear` asks of the inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.layer = layer
        self.magnitudes = torch.zeros(layer.in_features)

    def multiply(self, x: Tensor, activation: Activation) -> Tensor:
        self._observe(x)
        return super().multiply(x, activation)

    def multiply_with(self, x: Tensor, other: Tensor, operation: Literal["add", "mul"]) -> Tensor:
        self._observe(x)
        return super().multiply_with(x, other, operation)

    def _observe(self, x: Tensor) -> None:
        shares = x / x.abs().amax(dim=1, keepdim=True).clamp(min=_MIN_ROW_MAX)
        self.magnitudes = shares.square().mean(dim=0).sqrt()


class SplitGLU(nn.Module):
    """The bias-free first layer of a gated feed-forward as two layers, both packed by `pack_layers`."""

    gate: OnednnLinear
    value: OnednnLinear

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        for name, weight in zip(("gate", "value"), layer.weight.detach().chunk(2), strict=True):
            half = nn.Linear(layer.in_features, len(weight), bias=False, device="meta")
            half.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, half)


def quantize_rows_uint8(matrix: Tensor) -> Tensor:
    """fp32 (R, C) to uint8 (R, C + 8): C steps from 0 to 255 for the smallest to the largest value of a row, scale, offset."""
    rows: Tensor = torch.ops.quantized.embedding_bag_byte_prepack(matrix)
    return rows


def pack_layers(model: nn.Module) -> None:
    """Packs the linear layers of a model in place if it is on a CPU where oneDNN computes in its dtype."""
    replace_layers(model, nn.Linear, lambda layer: PackedLinear(layer) if can_pack(layer.weight) else layer)


def quantize_int8(model: nn.Module, forward: Callable[[], object]) -> None:
    """Converts the linear layers of an fp32 model on the CPU to int8 in place; `forward` runs it on some input."""
    replace_layers(model, nn.Linear, lambda layer: _Observer(layer) if can_pack(layer.weight) else layer)
    forward()
    replace_layers(model, _Observer, lambda observer: Int8Linear(observer.layer, observer.magnitudes))


def replace_layers(model: nn.Module, kind: type[Layer], make: Callable[[Layer], nn.Module]) -> None:
    """Replaces the layers of one kind in a model in place; `make` returns a layer that is to stay."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, kind):
                setattr(parent, name, make(layer))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight at full speed."""
    if weight.device.type != "cpu" or not _HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
