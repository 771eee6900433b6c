"""The fused CPU path against plain torch, which runs when gradients are recorded."""

import pytest
import torch
from torch import nn

from virnuc_core.models.fused import linear, linear_add_norm, linear_gated_gelu, linear_gelu


@pytest.mark.parametrize("tokens", [1, 2, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_plain(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 32).to(dtype)
    gated = nn.Linear(24, 64, bias=False).to(dtype)
    norm = nn.LayerNorm(32).to(dtype)
    x, residual = torch.randn(tokens, 24, dtype=dtype), torch.randn(tokens, 32, dtype=dtype)

    def outputs() -> list[torch.Tensor]:
        return [
            linear(layer, x),
            linear_gelu(layer, x, layer),
            linear_gated_gelu(gated, x, layer),
            *linear_add_norm(layer, x, residual, norm, layer),
        ]

    plain = outputs()
    with torch.inference_mode():
        fused = outputs()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)


def test_dropout_is_on_the_branch_only() -> None:
    layer, norm, residual = nn.Linear(8, 8), nn.LayerNorm(8), torch.randn(4, 8)
    total, normed = linear_add_norm(layer, torch.randn(4, 8), residual, norm, layer, dropout=1.0)
    assert torch.equal(total, residual)
    assert torch.equal(normed, norm(residual))


def test_a_post_norm_layer_adds_the_next_branch_to_the_norm() -> None:
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    added_to, normed = linear_add_norm(layer, x, residual, norm, layer, normed_residual=True)
    assert torch.equal(added_to, normed)
    torch.testing.assert_close(normed, norm(residual + layer(x)))
