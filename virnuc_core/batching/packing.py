"""Packing of distinct sequences into bins of at most `token_budget` tokens, longest first.

First-fit-decreasing on the histogram of lengths: sequences of equal length are interchangeable, so the loop is over
bins and the distinct lengths in each, never over sequences.
"""

import logging
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from virnuc_core.columns import ByteColumn, Int64, concatenated_ranges

_log = logging.getLogger(__name__)


def distinct_rows(column: ByteColumn) -> tuple[Int64, Int64]:
    """The first row of each distinct string, int64 (d,), ascending; and the number of each row's string, int64 (n,).

    The column has less than 2 GiB. Arrow does it without the interpreter, which launches kernels meanwhile.
    """
    # Numbered in the order of their first rows. `to_numpy` would import pandas.
    buffer = column.to_arrow().dictionary_encode().indices.buffers()[1]
    numbers = np.frombuffer(buffer, np.int32, len(column)).astype(np.int64)
    is_first = np.diff(np.maximum.accumulate(numbers), prepend=-1) > 0
    return np.flatnonzero(is_first), numbers


@dataclass(frozen=True, slots=True)
class Packing:
    """The batches of one column of token sequences; batch b is rows[bounds[b]:bounds[b + 1]].

    `rows` (n,) is a permutation, longest first within a batch, ties in row order. `capacity` is the number of slots for
    tokens in all batches; a sequence over the budget counts as a full batch.
    """

    rows: Int64
    bounds: Int64
    capacity: int

    @property
    def batches(self) -> list[Int64]:
        """The rows of each batch."""
        return [self.rows[begin:end] for begin, end in pairwise(self.bounds.tolist())]


def pack(num_tokens: Int64, token_budget: int) -> Packing:
    """Assigns every sequence to one batch, deterministically; one longer than `token_budget` runs alone.

    `num_tokens` is int64 (n,), all above 0.
    """
    by_length = np.argsort(-num_tokens, kind="stable")
    lengths, counts = np.unique(num_tokens, return_counts=True)
    starts = len(num_tokens) - np.cumsum(counts)  # where each length begins in by_length
    runs, runs_until = _fill_bins(lengths.tolist(), counts.tolist(), starts.tolist(), token_budget)
    run_start, run_length = np.array(runs, np.int64).reshape(-1, 2).T
    order, rows_until = concatenated_ranges(run_start, run_length)
    rows, bounds = by_length[order], rows_until[np.array(runs_until, np.int64)]
    tokens_until = np.concatenate(([0], np.cumsum(num_tokens[rows])))
    capacity = int(np.maximum(np.diff(tokens_until[bounds]), token_budget).sum())
    return Packing(rows, bounds, capacity)


def _fill_bins(
    lengths: list[int], counts: list[int], starts: list[int], token_budget: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Fills bins one by one with the longest remaining lengths that fit; consumes its arguments.

    `lengths` are distinct and ascending, `starts` their offsets in the order by descending length. Returns the runs
    of equal length as (start, number of sequences), and the number of runs up to each bin, 0 first.
    """
    runs: list[tuple[int, int]] = []
    runs_until = [0]
    while lengths:
        room = max(token_budget, lengths[-1])
        at = len(lengths) - 1
        while at >= 0:
            taken = min(counts[at], room // lengths[at])
            runs.append((starts[at], taken))
            room -= taken * lengths[at]
            counts[at] -= taken
            starts[at] += taken
            if counts[at] == 0:
                del lengths[at], counts[at], starts[at]
            at = bisect_right(lengths, room, hi=at) - 1
        runs_until.append(len(runs))
    return runs, runs_until


def warn_if_inefficient(model_name: str, efficiency: float, num_batches: int) -> None:
    """Warns of low packing efficiency, unless there are only a few batches, of which the last one is partly filled."""
    if num_batches >= 10 and efficiency < 0.85:
        _log.warning(
            "%s: packing efficiency is %.0f%% over %d batches, below 85%%. Raise the token budget if sequences are almost as "
            "long; lower it if a shard fills few batches.",
            model_name,
            100 * efficiency,
            num_batches,
        )
