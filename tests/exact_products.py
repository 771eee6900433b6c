"""What the products of `virnuc_core.models.kernels.products` must give, in fp64: for its tests, and in its place on the CPU."""

from torch import Tensor
from torch.nn import functional


def normed(operand: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (operand.double() @ weight.double().t()) * factor.double().t() + bias.double()


def activated(product: Tensor, *, gated: bool) -> Tensor:
    """GELU of a product; gated, of its even columns, times the odd ones."""
    return functional.gelu(product[:, ::2]) * product[:, 1::2] if gated else functional.gelu(product)


def added(
    x: Tensor,
    weight: Tensor,
    alpha: float,
    residual: Tensor,
    bias: Tensor,
    post_norm: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    kept = residual.double()
    if post_norm is not None:
        gain, rstd, mean_rstd = (each.double() for each in post_norm)
        kept = (kept * rstd.t() - mean_rstd.t()) * gain
    return alpha * (x.double() @ weight.double().t()) + kept + bias.double()
