"""The limit: a model's own matrix products alone, back to back, on numbers of real scale.

Four copies of the weights take turns, so that no weight stays in the cache from one layer to the next; a
forward pass has as many as it has layers.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.fused import quantize_rows
from virnuc_core.specs import ModelSpec, ResolvedPrecision

Product = Callable[[], Tensor]

_COPIES: Final = 4
_WEIGHT_STD: Final = 0.02
_DTYPES: Final[dict[ResolvedPrecision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def gemm_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Input and output width of every matrix product of a layer."""
    width, ffn = spec.embedding_dim, spec.ffn_dim
    inner = ffn if spec.family == "esm2" else 2 * ffn
    return (width, 3 * width), (width, width), (width, inner), (ffn, width)


class GemmFloor:
    """The matrix products of a whole forward pass over `num_tokens` tokens, ready to be launched."""

    def __init__(self, spec: ModelSpec, precision: ResolvedPrecision, num_tokens: int, device: str) -> None:
        self._num_layers = spec.num_layers
        per_shape = [
            _fp8_products(num_tokens, inputs, outputs, device)
            if precision == "fp8"
            else _products(num_tokens, inputs, outputs, device, _DTYPES[precision])
            for inputs, outputs in gemm_shapes(spec)
        ]
        self._layers = cycle(list(zip(*per_shape, strict=True)))

    def launch(self) -> None:
        """Launches the products of all layers."""
        for _ in range(self._num_layers):
            for product in next(self._layers):
                product()


def _products(num_tokens: int, inputs: int, outputs: int, device: str, dtype: torch.dtype) -> list[Product]:
    """The product x W^T + b in one dtype, for each copy of W; by oneDNN on the CPU, as the models do it."""
    x = torch.randn(num_tokens, inputs, device=device, dtype=dtype)
    bias = torch.randn(outputs, device=device, dtype=dtype)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) * _WEIGHT_STD for _ in range(_COPIES)]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        multiply = torch.ops.mkldnn._linear_pointwise
        return [partial(multiply, x, weight, bias, "none", [], "") for weight in weights]
    return [partial(functional.linear, x, weight, bias) for weight in weights]


def _fp8_products(num_tokens: int, inputs: int, outputs: int, device: str) -> list[Product]:
    """The product x W^T in fp8 with a scale for each row of both, bf16 out."""
    x, x_scale = quantize_rows(torch.randn(num_tokens, inputs, device=device))
    products: list[Product] = []
    for _ in range(_COPIES):
        weight, scale = quantize_rows(torch.randn(outputs, inputs, device=device) * _WEIGHT_STD)
        products.append(
            partial(
                torch._scaled_mm,
                x,
                weight.t(),
                scale_a=x_scale,
                scale_b=scale.t(),
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        )
    return products
