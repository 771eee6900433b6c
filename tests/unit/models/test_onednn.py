"""Linear layers in int8, and models made of them; packed layers are tried in test_fused.py."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from tests.made_models import make_spec
from virnuc_core.inference.device import cpu_has_int8
from virnuc_core.models.checkpoint import build_model
from virnuc_core.models.onednn import Int8Linear, PackedLinear, SplitGLU, quantize_int8
from virnuc_core.specs import Family

pytestmark = pytest.mark.skipif(not cpu_has_int8(), reason="this CPU has no int8 instructions")


def made_layer(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_products_are_within_the_rounding_of_eight_bits(
    bias: bool, activation: Literal["none", "gelu"]
) -> None:
    layer = made_layer(320, 96, bias=bias)
    exact, quantized = PackedLinear(layer), Int8Linear(layer, torch.ones(320))
    x = torch.randn(700, 320) * 10.0 ** torch.linspace(-3, 3, 700)[:, None] + 0.5
    other = torch.randn(700, 96)
    expected = exact.multiply(x, activation)
    found = quantized.multiply(x, activation)
    for row in (0, 350, 699):
        assert relative_error(found[row], expected[row]) < 0.02
    # Three standard deviations of rounding to a 255th of what is 6.5 standard deviations wide.
    assert relative_error(quantized.multiply(x[300:400], "none"), exact.multiply(x[300:400], "none")) < 0.015
    for operation in ("add", "mul"):
        combined = quantized.multiply_with(x, other, operation)
        plain = quantized.multiply(x, "none")
        assert torch.equal(combined, plain + other if operation == "add" else plain * other)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    quantized = Int8Linear(made_layer(64, 48), torch.ones(64))
    x = torch.randn(1500, 64)
    x[3] *= 1e4
    together = quantized.multiply(x, "gelu")
    for begin, end in ((0, 1), (1, 258), (258, 1500)):
        assert torch.equal(quantized.multiply(x[begin:end], "gelu"), together[begin:end])


@torch.inference_mode()
def test_a_row_of_zeros_gives_the_bias() -> None:
    layer = made_layer(24, 8)
    assert torch.equal(
        Int8Linear(layer, torch.ones(24)).multiply(torch.zeros(2, 24), "none"), layer.bias.expand(2, 8)
    )


@torch.inference_mode()
def test_channels_far_above_the_others_are_divided_by_powers_of_two() -> None:
    layer = made_layer(256, 64)
    x = torch.randn(500, 256)
    x[:, :3] *= torch.tensor([20.0, 60.0, 200.0])
    shares = (x / x.abs().amax(dim=1, keepdim=True)).square().mean(dim=0).sqrt()
    balanced, plain = Int8Linear(layer, shares), Int8Linear(layer, torch.ones(256))
    assert plain.shrink is None
    assert balanced.shrink is not None
    assert (balanced.shrink <= 1).all()
    assert (balanced.shrink[3:] == 1).all()
    assert (balanced.shrink.log2() % 1 == 0).all()
    exact = PackedLinear(layer).multiply(x, "none")
    # What the few large channels do not explain is lost without it.
    large = x[:, :3] @ layer.weight[:, :3].t()
    errors = [relative_error(one.multiply(x, "none") - large, exact - large) for one in (balanced, plain)]
    assert errors[0] < errors[1] / 3


@torch.inference_mode()
@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_every_linear_layer_of_a_model_is_converted(family: Family) -> None:
    model = build_model(make_spec(family)).requires_grad_(False).eval()
    ids = torch.randint(5, 24, (60,))
    model.prepare_inference()
    quantize_int8(model, lambda: model.embed(ids, model.build_layout(np.array([0, 60], np.int32), "sdpa")))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(Int8Linear) == (8 if family == "esm2" else 10)
    assert kinds.count(SplitGLU) == (0 if family == "esm2" else 2)
    assert nn.Linear not in kinds
    model.to("cpu")


@torch.inference_mode()
def test_channels_far_above_the_others_are_found_in_a_model() -> None:
    """A gain of a LayerNorm that the next weights undo changes nothing in fp32."""
    torch.manual_seed(0)
    model = build_model(make_spec("esm2")).requires_grad_(False).eval()
    ids = torch.randint(5, 24, (64,))

    def embed() -> torch.Tensor:
        return model.embed(ids, model.build_layout(np.array([0, 30, 64], np.int32), "sdpa"))

    for layer in model.layers:
        for norm, linear in ((layer.attention_norm, layer.qkv), (layer.ffn_norm, layer.ffn_in)):
            norm.weight[2] *= 200
            linear.weight[:, 2] /= 200
    expected = embed()
    quantize_int8(model, embed)
    assert all(layer.qkv.shrink is not None and layer.qkv.shrink[2] <= 1 / 8 for layer in model.layers)
    assert torch.cosine_similarity(embed(), expected).min() > 0.995
