"""Packing: fixed cases, fill, warnings and errors (the rules are in tests/properties/test_packing.py)."""

import numpy as np
import pytest

from virnuc_core.batching.packing import pack, warn_if_inefficient
from virnuc_core.errors import UsageError

RANDOM = np.random.default_rng(0)


def test_longest_first_and_the_largest_that_fits_next() -> None:
    packing = pack(np.array([3, 9, 2, 5, 5, 1], np.int64), 10)
    assert [rows.tolist() for rows in packing.batches] == [[1, 5], [3, 4], [0, 2]]
    assert packing.batch_tokens.tolist() == [10, 10, 5]
    assert (packing.num_tokens, packing.capacity) == (25, 30)
    assert packing.efficiency == pytest.approx(25 / 30)


def test_a_sequence_over_the_budget_runs_alone_and_counts_as_full() -> None:
    packing = pack(np.array([4, 25, 6], np.int64), 10)
    assert [rows.tolist() for rows in packing.batches] == [[1], [2, 0]]
    assert packing.efficiency == 1.0


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_to_pack(padded: bool) -> None:
    packing = pack(np.array([], np.int64), 10, padded=padded)
    assert (packing.batches, packing.efficiency) == ([], 1.0)


def test_padded_batches_hold_sequences_of_similar_length() -> None:
    packing = pack(np.array([3, 9, 2, 5, 5, 1], np.int64), 12, padded=True)
    assert [rows.tolist() for rows in packing.batches] == [[1], [3, 4], [0, 2, 5]]
    assert packing.batch_tokens.tolist() == [9, 10, 6]
    assert packing.batch_slots.tolist() == [9, 10, 9]
    assert (packing.num_tokens, packing.capacity) == (25, 36)
    too_long = pack(np.array([30, 4], np.int64), 12, padded=True)
    assert (too_long.bounds.tolist(), too_long.capacity) == ([0, 1, 2], 42)


def test_impossible_input_is_refused() -> None:
    with pytest.raises(UsageError, match="token budget is 0"):
        pack(np.array([3], np.int64), 0)
    with pytest.raises(ValueError, match="without tokens"):
        pack(np.array([3, 0], np.int64), 10)


@pytest.mark.parametrize(
    ("residues", "budget", "efficiency"),
    [
        (RANDOM.integers(100, 167, 20_000), 4096, 0.97),  # frames of 500 bp
        (RANDOM.integers(100, 167, 20_000), 16_384, 0.97),
        (RANDOM.lognormal(5.7, 0.8, 5000).astype(np.int64), 4096, 0.95),  # proteins of all lengths
    ],
)
def test_batches_are_nearly_full(residues: np.ndarray, budget: int, efficiency: float) -> None:
    assert pack(residues + 2, budget).efficiency >= efficiency


@pytest.mark.parametrize(
    ("efficiency", "num_batches", "warns"), [(0.6, 20, True), (0.85, 20, False), (0.6, 9, False)]
)
def test_a_low_efficiency_over_many_batches_is_warned_of(
    efficiency: float, num_batches: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_inefficient("esm2", efficiency, num_batches)
    assert ("esm2: packing efficiency is 60 % over 20 batches" in caplog.text) == warns
    assert warns or caplog.text == ""
