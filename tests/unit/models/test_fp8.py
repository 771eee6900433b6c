"""fp8 e4m3 weights: values and row scales on the CPU; tests/gpu covers the products."""

import torch
from torch import nn

from virnuc_core.models.fused import Fp8Linear, quantize_layers, quantize_rows


def test_rows_are_within_the_rounding_of_e4m3() -> None:
    matrix = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    matrix *= 10.0 ** torch.arange(-3, 4)[:, None]
    values, scale = quantize_rows(matrix)
    restored = values.float() * scale
    # Three mantissa bits; values small in their row are rounded to steps of 2^-9.
    assert ((restored - matrix).abs() <= (matrix.abs() / 16).clamp(min=2**-10 * scale)).all()


def test_the_largest_of_a_row_becomes_the_largest_of_e4m3() -> None:
    values, scale = quantize_rows(torch.tensor([[3.0, -6.0], [0.0, 0.0]]))
    assert values.float().tolist() == [[224.0, -448.0], [0.0, 0.0]]
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_layers_with_widths_for_tensor_cores_are_in_fp8() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24))
    wanted = model[0].weight.detach().clone()
    quantize_layers(model)
    assert [type(layer) for layer in model] == [Fp8Linear, nn.Linear]
    restored = model[0].weight.float() * model[0].scale.t()
    assert torch.allclose(restored, wanted, rtol=1 / 16, atol=1e-3)
