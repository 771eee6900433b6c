"""Packing: fixed cases, fill, warnings and errors (the rules are in tests/properties/test_packing.py)."""

import logging

import numpy as np
import pytest

from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.batching.packing import iter_batches, pack, warn_if_inefficient
from virnuc_core.errors import UsageError


def test_longest_first_and_the_largest_that_fits_next() -> None:
    packing = pack(np.array([3, 9, 2, 5, 5, 1], np.int64), 10)
    assert packing.rows.tolist() == [1, 5, 3, 4, 0, 2]
    assert packing.bounds.tolist() == [0, 2, 4, 6]
    assert packing.batch_tokens.tolist() == [10, 10, 5]
    assert (packing.num_tokens, packing.capacity, packing.num_batches) == (25, 30, 3)
    assert packing.efficiency == pytest.approx(25 / 30)


def test_a_sequence_over_the_budget_runs_alone_and_counts_as_full() -> None:
    packing = pack(np.array([4, 25, 6], np.int64), 10)
    assert packing.rows.tolist() == [1, 2, 0]
    assert packing.bounds.tolist() == [0, 1, 3]
    assert packing.efficiency == 1.0


def test_nothing_to_pack() -> None:
    packing = pack(np.array([], np.int64), 10)
    assert packing.num_batches == 0
    assert packing.efficiency == 1.0
    assert list(iter_batches(TokenColumn(np.array([], np.int32), np.array([0])), packing)) == []


def test_padded_batches_are_rectangles() -> None:
    packing = pack(np.array([3, 9, 2, 5, 5, 1], np.int64), 12, padded=True)
    assert packing.rows.tolist() == [1, 3, 4, 0, 2, 5]
    assert packing.bounds.tolist() == [0, 1, 3, 6]
    assert packing.batch_tokens.tolist() == [9, 10, 6]
    assert packing.batch_slots.tolist() == [9, 10, 9]
    assert (packing.num_tokens, packing.capacity) == (25, 36)
    too_long = pack(np.array([30, 4], np.int64), 12, padded=True)
    assert too_long.bounds.tolist() == [0, 1, 2]
    assert too_long.capacity == 42


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_without_tokens_is_refused(budget: int) -> None:
    with pytest.raises(UsageError, match=f"token budget is {budget}"):
        pack(np.array([3], np.int64), budget)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        pack(np.array([3, 0], np.int64), 10)


@pytest.mark.parametrize("budget", [4096, 16384])
def test_open_frames_of_500_bp_fill_97_percent(budget: int) -> None:
    residues = np.random.default_rng(0).integers(100, 167, 20_000)
    assert pack(residues + 2, budget).efficiency >= 0.97


def test_a_low_efficiency_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    packing = pack(np.full(20, 6, np.int64), 10)
    with caplog.at_level(logging.WARNING):
        warn_if_inefficient("esm2", packing.efficiency, packing.num_batches)
    assert "esm2: packing efficiency is 60 % over 20 batches" in caplog.text


@pytest.mark.parametrize(("efficiency", "num_batches"), [(0.85, 20), (0.6, 9), (0.1, 1), (1.0, 0)])
def test_a_good_fill_or_a_handful_of_batches_is_not_warned_of(
    efficiency: float, num_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_inefficient("esm2", efficiency, num_batches)
    assert caplog.text == ""


def test_proteins_of_all_lengths_fill_95_percent() -> None:
    residues = np.random.default_rng(0).lognormal(5.7, 0.8, 5000).astype(np.int64)
    assert max(residues) > 3000
    assert pack(residues + 2, 4096).efficiency >= 0.95
