"""Matrix products of a layer and what follows them, fused as far as the device allows.

    CPU     oneDNN fuses the product with what follows, on weights that are packed when a model is loaded.
    CUDA    in 16 bit one Triton kernel does everything between two products of cuBLAS; before Hopper, another is the first
            product of a feed-forward layer together with its activation. On Hopper GPUs, `virnuc_core.models.fused` replaces both.
    else    plain torch, also for training.

Shapes: T tokens, I and O a linear layer's input and output width, D width of the hidden states.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.models.kernels import has_kernels


class InterleavedGLU(nn.Module):
    """The bias-free first layer of a gated feed-forward; rows of gate and value alternate in `weight` (2 F, I)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(interleave(layer.weight.detach()))


def interleave(rows: Tensor) -> Tensor:
    """The rows of the first and the second half in turn."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


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


Linear = nn.Linear | OnednnLinear


def arrange_glu(layer: nn.Linear) -> nn.Linear | InterleavedGLU | SplitGLU:
    """The first layer of a gated feed-forward as the kernel of its device takes it; for inference only."""
    if can_pack(layer.weight):
        return SplitGLU(layer)
    return InterleavedGLU(layer) if _fuses_activation(layer.weight) else layer


def linear(layer: Linear, x: Tensor) -> Tensor:
    """(T, I) -> (T, O)."""
    if isinstance(layer, OnednnLinear):
        return layer.multiply(x, "none")
    return functional.linear(x, layer.weight, layer.bias)


def linear_gelu(layer: Linear | InterleavedGLU | SplitGLU, x: Tensor, *, gated: bool) -> Tensor:
    """(T, I) -> (T, F): GELU (erf form) of the product; gated, of its first half, times the second half, without a bias."""
    if isinstance(layer, OnednnLinear):
        return layer.multiply(x, "gelu")
    if isinstance(layer, SplitGLU):
        return layer.value.multiply_with(x, layer.gate.multiply(x, "gelu"), "mul")
    if isinstance(layer, InterleavedGLU):
        return _fused_gelu(x, layer.weight, None)
    if not gated and _fuses_activation(layer.weight):
        return _fused_gelu(x, layer.weight, layer.bias)
    product = functional.linear(x, layer.weight, layer.bias)
    if not gated:
        return functional.gelu(product)
    gate, value = product.chunk(2, dim=-1)
    return functional.gelu(gate) * value


def _fused_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from virnuc_core.models.kernels import gemm_gelu

    return gemm_gelu.linear_gelu(x, weight, bias)


def linear_add_norm(
    layer: Linear, x: Tensor, residual: Tensor, norm: nn.LayerNorm, *, post_norm: bool, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The end of a branch: its last product, the residual connection, and the next LayerNorm.

    `x` is (T, I), `residual` (T, D). Returns what the next branch is added to, (T, D), which is the LayerNorm with
    `post_norm` and else the sum; and the LayerNorm. `dropout` must be 0 outside training.
    """
    if isinstance(layer, OnednnLinear):
        total = layer.multiply_with(x, residual, "add")
    else:
        branch = functional.linear(x, layer.weight, layer.bias)
        if has_half_kernels(branch):
            from virnuc_core.models.kernels.rowwise import add_norm

            return add_norm(branch, residual, norm.weight, norm.bias, norm.eps, post_norm=post_norm)
        total = residual + functional.dropout(branch, dropout)
    normed = norm(total)
    return (normed if post_norm else total), normed


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of x (T, D), in its dtype."""
    if has_half_kernels(x):
        from virnuc_core.models.kernels.rowwise import add_norm

        return add_norm(None, x, norm.weight, norm.bias, norm.eps, post_norm=True)[1]
    normed: Tensor = norm(x)
    return normed


def has_half_kernels(x: Tensor) -> bool:
    """Whether the kernels for 16 bit apply to a tensor."""
    is_half = x.dtype == torch.float16 or x.dtype == torch.bfloat16
    return is_half and has_kernels(x.device) and not torch.is_grad_enabled()


def _fuses_activation(weight: Tensor) -> bool:
    """Whether the kernel with the activation multiplies by a weight: it loads 16 bytes at once, and not as Hopper likes."""
    if not has_half_kernels(weight) or weight.shape[1] % 8:
        return False
    from virnuc_core.models.kernels.launch import DATACENTER_SHARED_MEMORY, shared_memory

    return shared_memory(weight.device) < DATACENTER_SHARED_MEMORY
