import numpy as np
import pytest
import torch

from virnuc_core.models.attention import (
    alibi_slopes,
    apply_rotary,
    position_ids,
    rotary_table,
    sequence_index,
)


def test_positions_start_again_in_each_sequence() -> None:
    bounds = torch.tensor([0, 0, 3, 5, 5, 6, 6], dtype=torch.int32)
    assert position_ids(bounds, 6).tolist() == [0, 1, 2, 0, 1, 0]
    assert sequence_index(bounds, 6).tolist() == [1, 1, 1, 2, 2, 4]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 3e-3)])
def test_rotation_is_that_of_complex_numbers(dtype: torch.dtype, tolerance: float) -> None:
    heads = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 1, 7, 500, 1022])
    rotated = apply_rotary(heads, rotary_table(8, positions))
    assert rotated.dtype == dtype

    angles = positions.numpy()[:, None] * 10000.0 ** (-np.arange(4) / 4)
    pairs = heads.numpy()[..., 0::2].astype(float) + 1j * heads.numpy()[..., 1::2]
    expected = pairs * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(rotated.numpy()[..., 0::2], expected.real, atol=tolerance)
    np.testing.assert_allclose(rotated.numpy()[..., 1::2], expected.imag, atol=tolerance)


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (6, [2, 4, 6, 8, 1, 3]),
        (1, [8]),
    ],
)
def test_alibi_slopes_of_any_head_count(num_heads: int, exponents: list[float]) -> None:
    torch.testing.assert_close(alibi_slopes(num_heads), 2.0 ** -torch.tensor(exponents))
