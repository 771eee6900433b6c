"""The fused CPU path against plain torch, which runs where gradients are recorded."""

import pytest
import torch
from torch import nn

from virnuc_core.models.linear import linear, linear_gated_gelu, linear_gelu, linear_residual


@pytest.mark.parametrize("tokens", [1, 2, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_plain(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 32).to(dtype)
    gated = nn.Linear(24, 64, bias=False).to(dtype)
    x, residual = torch.randn(tokens, 24, dtype=dtype), torch.randn(tokens, 32, dtype=dtype)

    def outputs() -> list[torch.Tensor]:
        return [
            linear(layer, x),
            linear_gelu(layer, x),
            linear_gated_gelu(gated, x),
            linear_residual(layer, x, residual),
        ]

    plain = outputs()
    with torch.inference_mode():
        fused = outputs()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)


def test_dropout_is_on_the_branch_only() -> None:
    layer, residual = nn.Linear(8, 8), torch.randn(4, 8)
    assert torch.equal(linear_residual(layer, torch.randn(4, 8), residual, dropout=1.0), residual)
