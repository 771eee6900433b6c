"""Packing: every sequence once, budgets kept, the same every time, and as full as plain first-fit-decreasing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.batching.packing import iter_batches, pack

lengths_and_budget = st.tuples(
    st.lists(st.integers(1, 60), max_size=80).map(lambda n: np.array(n, np.int64)), st.integers(1, 200)
)


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


@given(lengths_and_budget)
def test_every_row_is_in_exactly_one_batch(case: tuple[np.ndarray, int]) -> None:
    num_tokens, budget = case
    packing = pack(num_tokens, budget)
    assert sorted(packing.rows.tolist()) == list(range(len(num_tokens)))
    assert packing.bounds[0] == 0
    assert packing.bounds[-1] == len(num_tokens)
    assert (np.diff(packing.bounds) > 0).all()


@given(lengths_and_budget)
def test_no_batch_of_several_sequences_is_over_the_budget(case: tuple[np.ndarray, int]) -> None:
    num_tokens, budget = case
    packing = pack(num_tokens, budget)
    for b, total in enumerate(packing.batch_tokens):
        rows = packing.rows[packing.bounds[b] : packing.bounds[b + 1]]
        assert num_tokens[rows].sum() == total
        assert total <= budget or len(rows) == 1


@given(lengths_and_budget)
def test_bins_are_those_of_first_fit_decreasing(case: tuple[np.ndarray, int]) -> None:
    num_tokens, budget = case
    packing = pack(num_tokens, budget)
    bins = [
        num_tokens[packing.rows[begin:end]].tolist()
        for begin, end in zip(packing.bounds, packing.bounds[1:], strict=False)
    ]
    assert bins == first_fit_decreasing(num_tokens.tolist(), budget)


@given(lengths_and_budget)
def test_efficiency_is_a_share_and_packing_is_deterministic(case: tuple[np.ndarray, int]) -> None:
    num_tokens, budget = case
    packing, again = pack(num_tokens, budget), pack(num_tokens, budget)
    assert 0 < packing.efficiency <= 1
    np.testing.assert_array_equal(packing.rows, again.rows)
    np.testing.assert_array_equal(packing.bounds, again.bounds)


@given(lengths_and_budget)
def test_equal_lengths_keep_their_row_order(case: tuple[np.ndarray, int]) -> None:
    num_tokens, budget = case
    rows = pack(num_tokens, budget).rows
    for length in set(num_tokens.tolist()):
        of_length = rows[num_tokens[rows] == length]
        assert (np.diff(of_length) > 0).all()


@given(lengths_and_budget, st.integers(0, 5))
def test_batches_hold_the_tokens_of_their_rows(case: tuple[np.ndarray, int], skipped: int) -> None:
    num_tokens, budget = case
    offsets = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64) + skipped
    tokens = TokenColumn(np.arange(offsets[-1], dtype=np.int32), offsets)
    for batch in iter_batches(tokens, pack(tokens.num_tokens, budget)):
        assert batch.input_ids.dtype == np.int32
        assert batch.cu_seqlens.dtype == np.int32
        assert batch.cu_seqlens[-1] == batch.num_tokens
        assert batch.max_seqlen == np.diff(batch.cu_seqlens).max()
        for i, row in enumerate(batch.rows):
            expected = tokens.input_ids[offsets[row] : offsets[row + 1]]
            got = batch.input_ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
            np.testing.assert_array_equal(got, expected)
