"""The fused CPU path against plain torch, and weights in fp8; fp8 products are tried in tests/gpu."""

import pytest
import torch
from torch import nn

from virnuc_core.models.fused import (
    Fp8Linear,
    arrange_glu,
    linear,
    linear_add_norm,
    linear_gated_gelu,
    linear_gelu,
    quantize_layers,
    quantize_rows,
)
from virnuc_core.models.onednn import PackedLinear, can_pack, pack_layers


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
        assert isinstance(packed["linear"], PackedLinear)
        assert isinstance(packed["gated"].value, PackedLinear)

    def outputs(layers: nn.ModuleDict) -> list[torch.Tensor]:
        layer = layers["linear"]
        return [
            linear(layer, x),
            linear_gelu(layer, x, layer),
            linear_gated_gelu(layers["gated"], x, layer),
            *linear_add_norm(layer, x, residual, norm, layer),
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
    packed = PackedLinear(layer)
    x = torch.randn(600, 320, dtype=dtype)
    plain = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], "none")
    together = packed.multiply(x, "gelu")
    assert torch.equal(together, plain)
    for begin, end in ((0, 7), (7, 300), (300, 600)):
        assert torch.equal(packed.multiply(x[begin:end], "gelu"), together[begin:end])


def test_the_residual_of_dropout_and_of_a_post_norm_layer() -> None:
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    total, normed = linear_add_norm(layer, x, residual, norm, layer, dropout=1.0)
    assert torch.equal(total, residual)
    assert torch.equal(normed, norm(residual))
    added_to, normed = linear_add_norm(layer, x, residual, norm, layer, normed_residual=True)
    assert torch.equal(added_to, normed)
    torch.testing.assert_close(normed, norm(residual + layer(x)))


def test_fp8_rows_are_within_the_rounding_of_e4m3() -> None:
    matrix = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    matrix *= 10.0 ** torch.arange(-3, 4)[:, None]
    values, scale = quantize_rows(matrix)
    # Three bits of mantissa; what is small in its row is rounded to steps of 2^-9.
    assert ((values.float() * scale - matrix).abs() <= (matrix.abs() / 16).clamp(min=2**-10 * scale)).all()
    values, scale = quantize_rows(torch.tensor([[3.0, -6.0], [0.0, 0.0]]))
    assert values.float().tolist() == [[224.0, -448.0], [0.0, 0.0]]
    assert (scale > 0).all()


def test_layers_with_widths_for_tensor_cores_are_in_fp8() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24))
    wanted = model[0].weight.detach().clone()
    quantize_layers(model)
    assert [type(layer) for layer in model] == [Fp8Linear, nn.Linear]
    assert torch.allclose(model[0].weight.float() * model[0].scale.t(), wanted, rtol=1 / 16, atol=1e-3)
