import numpy as np
import pytest

from virnuc_core.training.sampling import sample_weights, thin


def test_classes_weigh_alike_and_groups_by_their_size_to_a_power() -> None:
    is_viral = np.array([True] * 16 + [True] * 4 + [False] * 3)
    groups = np.array([0] * 16 + [1] * 4 + [2] * 3)
    weights = sample_weights(is_viral, groups, 0.5)
    assert weights.sum() == pytest.approx(1)
    assert weights[is_viral].sum() == pytest.approx(0.5)
    assert weights[groups == 0].sum() / weights[groups == 1].sum() == pytest.approx(4 / 2)
    np.testing.assert_allclose(sample_weights(is_viral, groups, 1.0)[is_viral], 0.5 / 20)


def test_few_frames_are_left_as_they_are() -> None:
    weights = np.full(10, 0.1)
    rows, left = thin(weights, 10, np.random.default_rng(0))
    assert rows.tolist() == list(range(10))
    np.testing.assert_array_equal(left, weights)


def test_what_is_left_stands_for_all() -> None:
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.3, size=20_000)
    weights /= weights.sum()
    values = rng.normal(size=20_000) + 3 * (weights > np.median(weights))
    rows, left = thin(weights, 4000, rng)
    assert len(rows) == pytest.approx(4000, rel=0.1)
    assert (np.diff(rows) > 0).all()
    assert left.sum() == pytest.approx(1)
    assert left @ values[rows] == pytest.approx(weights @ values, abs=0.1)
