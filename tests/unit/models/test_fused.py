"""Fused layers on the CPU, with plain torch in place of QuACK's kernels, against the layers that they are made of."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from tests.exact_products import activated, added, normed
from virnuc_core.models import fused, kernels
from virnuc_core.models.encoders import ESM2, DnabertS, Encoder
from virnuc_core.specs import Family, ModelSpec

if torch.cuda.is_available():
    pytest.skip("for the interpreter", allow_module_level=True)

FP8 = torch.float8_e4m3fn
BOUNDS = np.array([0, 40, 41, 60, 128], np.int32)


def multiply_normed(operand: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    product = normed(operand, factor, weight, bias)
    return product.to(torch.bfloat16 if operand.dtype == FP8 else operand.dtype)


def multiply_normed_gelu(
    operand: Tensor, factor: Tensor, weight: Tensor, bias: Tensor, *, gated: bool, out_factor: float
) -> Tensor:
    return (activated(normed(operand, factor, weight, bias), gated=gated) * out_factor).to(operand.dtype)


def add_product(
    x: Tensor,
    weight: Tensor,
    alpha: float,
    residual: Tensor,
    bias: Tensor,
    *,
    post_norm: tuple[Tensor, Tensor, Tensor] | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    total = added(x, weight, alpha, residual, bias, post_norm).float()
    residual.copy_(total)
    halves = total.unflatten(1, (2, -1))
    quantized = None if scale is None else (total * scale.t()).to(FP8)
    return halves.sum(2), halves.square().sum(2), quantized


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("virnuc_core.models.kernels.products")
    for function in (multiply_normed, multiply_normed_gelu, add_product):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "products", module, raising=False)


def made(family: Family, dtype: torch.dtype, spread: float) -> Encoder:
    """A model whose LayerNorms have gains and shifts of their own."""
    spec = ModelSpec(
        family=family, num_layers=3, embedding_dim=32, num_heads=2, ffn_dim=64, vocab_size=40,
        layer_norm_eps=1e-5, token_dropout=family == "esm2",
    )  # fmt: skip
    torch.manual_seed(0)
    model = ESM2(spec) if family == "esm2" else DnabertS(spec)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=spread)
    return model.to(dtype).requires_grad_(False).eval()


def embed(model: Encoder, repr_layer: int) -> Tensor:
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 24, int(BOUNDS[-1])))
    with torch.inference_mode():
        return model.embed(ids, model.build_layout(BOUNDS, "reference"), repr_layer)


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
@pytest.mark.parametrize(
    ("dtype", "product_dtype", "error"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.bfloat16, FP8, 0.2),  # the interpreter truncates to fp8 where a device rounds
    ],
)
def test_fused_layers_compute_what_plain_ones_do(
    family: Family, dtype: torch.dtype, product_dtype: torch.dtype, error: float
) -> None:
    exact, model = made(family, torch.float32, 0.2), made(family, dtype, 0.2)
    model.fuse(product_dtype)
    for repr_layer in range(4):
        expected = embed(exact, repr_layer)
        found = embed(model, repr_layer)
        assert float((found - expected).norm() / expected.norm()) < error


@torch.inference_mode()
def test_bounds_of_what_lies_between_two_products() -> None:
    """No output is larger, also where LayerNorms have outliers, and some are nearly as large."""
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(32), nn.Linear(32, 96)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    # Each row of `worst` is a LayerNorm in the direction of a row of weights, which its product is largest for.
    rows = layer.weight * norm.weight
    outputs = layer(norm(torch.cat((rows, -rows, torch.randn(1000, 32))))).abs().amax(0)
    share = outputs / fused.output_bounds(*fused.after_norm(norm, layer))
    assert float(share.max()) <= 1
    assert float(share.min()) > 0.9


@torch.inference_mode()
@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_values_in_fp8_do_not_saturate(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = []

    def observed(operand: Tensor, *args: Tensor, gated: bool, out_factor: float) -> Tensor:
        inner = multiply_normed_gelu(operand.float(), *args, gated=gated, out_factor=out_factor)
        largest.append(float(inner.abs().max()))
        return inner.to(operand.dtype)

    monkeypatch.setattr(sys.modules["virnuc_core.models.kernels.products"], "multiply_normed_gelu", observed)
    model = made(family, torch.bfloat16, 1.0)
    model.fuse(FP8)
    embed(model, 3)
    assert len(largest) == 3
    assert max(largest) <= 448
