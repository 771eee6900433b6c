"""Packing: every sequence once, within budget, deterministic, as full as first-fit-decreasing; duplicates found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.batching.packing import distinct_rows, pack, warn_if_inefficient
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.columns import ByteColumn

LENGTHS = st.lists(st.integers(1, 60), max_size=80).map(lambda lengths: np.array(lengths, np.int64))
BUDGETS = st.integers(1, 200)


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """The textbook algorithm, one sequence at a time."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for filled in bins:
            if sum(filled) + length <= budget:
                filled.append(length)
                break
        else:
            bins.append([length])
    return bins


@given(LENGTHS, BUDGETS)
def test_batches_are_those_of_first_fit_decreasing(num_tokens: np.ndarray, budget: int) -> None:
    packing = pack(num_tokens, budget)
    bins = [num_tokens[rows].tolist() for rows in packing.batches]
    assert bins == first_fit_decreasing(num_tokens.tolist(), budget)
    assert sorted(packing.rows.tolist()) == list(range(len(num_tokens)))
    # A sequence over the budget counts as full.
    assert packing.capacity == sum(max(budget, sum(lengths)) for lengths in bins)
    for length in set(num_tokens.tolist()):
        of_length = packing.rows[num_tokens[packing.rows] == length]
        assert (np.diff(of_length) > 0).all(), "sequences of one length are in row order"


@given(LENGTHS, BUDGETS, st.integers(0, 5))
def test_batches_hold_the_tokens_of_their_rows(num_tokens: np.ndarray, budget: int, skipped: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64) + skipped
    tokens = TokenColumn(np.arange(offsets[-1], dtype=np.int32), offsets)
    for rows in pack(tokens.num_tokens, budget).batches:
        batch = tokens.take(rows)
        assert (batch.input_ids.dtype, batch.cu_seqlens.dtype) == (np.int32, np.int32)
        assert batch.cu_seqlens[-1] == len(batch.input_ids)
        found = np.split(batch.input_ids, batch.cu_seqlens[1:-1])
        for row, ids in zip(rows, found, strict=True):
            np.testing.assert_array_equal(ids, tokens.input_ids[offsets[row] : offsets[row + 1]])


@pytest.mark.parametrize(
    ("efficiency", "num_batches", "warning"),
    [(0.6, 20, "esm2: packing efficiency is 60% over 20 batches"), (0.85, 20, ""), (0.6, 9, "")],
)
def test_a_low_efficiency_over_many_batches_is_warned_of(
    efficiency: float, num_batches: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_inefficient("esm2", efficiency, num_batches)
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


@given(st.lists(st.text("AC\x00", max_size=20)), st.text("ACG", max_size=9))
def test_equal_strings_are_found(strings: list[str], before: str) -> None:
    column = ByteColumn.from_strings([before, *strings, "more"]).rows(1, 1 + len(strings))
    first: dict[str, int] = {}
    for row, string in enumerate(strings):
        first.setdefault(string, row)
    rows, equal_to = distinct_rows(column)
    assert rows.tolist() == list(first.values())
    assert rows[equal_to].tolist() == [first[string] for string in strings]
