"""The fused CPU path against plain torch."""

import pytest
import torch
from torch import nn

from virnuc_core.models.layers import (
    OnednnLinear,
    arrange_glu,
    can_pack,
    linear,
    linear_add_norm,
    linear_gelu,
    pack_layers,
)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 2, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"linear": nn.Linear(24, 32), "gated": nn.Linear(24, 64, bias=False)}).to(dtype)
    norm = nn.LayerNorm(32).to(dtype)
    x, residual = torch.randn(tokens, 24, dtype=dtype), torch.randn(tokens, 32, dtype=dtype)
    packed = nn.ModuleDict({"linear": plain["linear"], "gated": arrange_glu(plain["gated"])})
    pack_layers(packed)
    if can_pack(plain["linear"].weight):
        assert isinstance(packed["linear"], OnednnLinear)
        assert isinstance(packed["gated"].value, OnednnLinear)

    def outputs(layers: nn.ModuleDict) -> list[torch.Tensor]:
        layer = layers["linear"]
        return [
            linear(layer, x),
            linear_gelu(layer, x, gated=False),
            linear_gelu(layers["gated"], x, gated=True),
            *linear_add_norm(layer, x, residual, norm, post_norm=False),
        ]

    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(outputs(packed), outputs(plain), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_changes_no_bit_and_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(320, 1280).to(dtype)
    if not can_pack(layer.weight):
        pytest.skip("torch without oneDNN")
    packed = OnednnLinear(layer.weight, layer.bias)
    x = torch.randn(600, 320, dtype=dtype)
    plain = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], "none")
    together = packed.multiply(x, "gelu")
    assert torch.equal(together, plain)
    for begin, end in ((0, 7), (7, 300), (300, 600)):
        assert torch.equal(packed.multiply(x[begin:end], "gelu"), together[begin:end])
