"""The fused CPU path against plain torch, and weights in fp8; fp8 products are tried in tests/gpu."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from virnuc_core.errors import UsageError
from virnuc_core.models.layers import (
    Fp8Linear,
    OnednnLinear,
    arrange_glu,
    can_pack,
    linear,
    linear_add_norm,
    linear_gelu,
    pack_layers,
    quantize_attention,
    quantize_feed_forward,
    quantize_rows,
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
            linear_gelu(layer, x, layer, gated=False),
            linear_gelu(layers["gated"], x, layer, gated=True),
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
    packed = OnednnLinear(layer.weight, layer.bias)
    x = torch.randn(600, 320, dtype=dtype)
    plain = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], "none")
    together = packed.multiply(x, "gelu")
    assert torch.equal(together, plain)
    for begin, end in ((0, 7), (7, 300), (300, 600)):
        assert torch.equal(packed.multiply(x[begin:end], "gelu"), together[begin:end])


def test_fp8_rows_are_within_the_rounding_of_e4m3() -> None:
    matrix = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    matrix *= 10.0 ** torch.arange(-3, 4)[:, None]
    values, scale = quantize_rows(matrix)
    # Three bits of mantissa; what is small in its row is rounded to steps of 2^-9.
    assert ((values.float() * scale - matrix).abs() <= (matrix.abs() / 16).clamp(min=2**-10 * scale)).all()
    values, scale = quantize_rows(torch.tensor([[3.0, -6.0], [0.0, 0.0]]))
    assert values.float().tolist() == [[224.0, -448.0], [0.0, 0.0]]
    assert (scale > 0).all()


@torch.inference_mode()
def test_fp8_layers_know_bounds_of_their_inputs() -> None:
    """No value between two products exceeds what it is divided by, also where LayerNorms have outliers."""
    torch.manual_seed(0)
    norm, qkv, out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
    first, gated, second = nn.Linear(32, 64), nn.Linear(32, 128, bias=False), nn.Linear(64, 32)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    # Each row of `worst` is a LayerNorm in the direction of a row of weights, which its product is largest for.
    rows = torch.cat([layer.weight for layer in (qkv, first, gated)]) * norm.weight
    worst = norm(torch.cat((rows, -rows, torch.randn(1000, 32))))
    values = qkv(worst)[:, 64:]
    quantized_qkv, quantized_out = quantize_attention(norm, qkv, out)
    assert 0.5 < float(values.abs().max() / (448 * quantized_out.input_scale)) <= 1
    divided = quantized_qkv.weight.float() * quantized_qkv.scale.t()
    expected = torch.cat((qkv.weight[:64], qkv.weight[64:] / quantized_out.input_scale))
    assert torch.allclose(divided, expected, rtol=1 / 16, atol=1e-2)
    _, after = quantize_feed_forward(norm, first, second, gated=False)
    assert 0.5 < float(functional.gelu(first(worst)).abs().max() / (448 * after.input_scale)) <= 1
    _, after = quantize_feed_forward(norm, gated, second, gated=True)
    gate, value = gated(worst).chunk(2, dim=1)
    assert float((functional.gelu(gate) * value).abs().max() / (448 * after.input_scale)) <= 1


def test_fp8_is_for_widths_that_tensor_cores_take() -> None:
    with pytest.raises(UsageError, match=r"multiples of 16, not 24 x 16: use --precision bf16"):
        Fp8Linear(torch.zeros(24, 16), None, torch.ones(()))
