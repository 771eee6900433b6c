"""Which sequences run together: bins of at most `token_budget` tokens, filled longest first.

First-fit-decreasing, done on the histogram of lengths: sequences of equal length are interchangeable, so
the loop is over bins and the distinct lengths in each, never over sequences.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.batching.packed_batch import PackedBatch, TokenColumn
from virnuc_core.columns import concatenated_ranges
from virnuc_core.errors import UsageError

logger = logging.getLogger(__name__)

EFFICIENCY_FLOOR: Final = 0.85
# With fewer batches the last one, which takes what is left, says little about the packing.
_FEWEST_BATCHES: Final = 10


@dataclass(frozen=True, slots=True)
class Packing:
    """The batches of one column of token sequences.

    Attributes:
        rows: int64 (n,), a permutation of the rows; batch b is rows[bounds[b]:bounds[b + 1]], longest
            first and, within one length, in row order.
        bounds: int64 (num_batches + 1,).
        batch_tokens: int64 (num_batches,), tokens of each batch.
        batch_slots: int64 (num_batches,), the same with padding.
        token_budget: most slots of a batch of more than one sequence.
    """

    rows: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    batch_tokens: npt.NDArray[np.int64]
    batch_slots: npt.NDArray[np.int64]
    token_budget: int

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return len(self.batch_tokens)

    @property
    def num_tokens(self) -> int:
        """Real tokens over all batches."""
        return int(self.batch_tokens.sum())

    @property
    def capacity(self) -> int:
        """Slots that the batches have room for; a sequence over the budget counts as a full batch."""
        return int(np.maximum(self.batch_slots, self.token_budget).sum())

    @property
    def efficiency(self) -> float:
        """Packing efficiency: `num_tokens / capacity`, in (0, 1]; 1.0 for no sequences."""
        return self.num_tokens / self.capacity if self.num_batches else 1.0


def pack(num_tokens: npt.NDArray[np.int64], token_budget: int, *, padded: bool = False) -> Packing:
    """Deals sequences to batches, the same way every time.

    Args:
        num_tokens: int64 (n,), tokens of each sequence, at least 1.
        token_budget: most tokens in one batch; a sequence longer than that runs alone.
        padded: every sequence of a batch takes up as many slots as the longest one, so those of similar
            length run together.

    Returns:
        Every row in exactly one batch.

    Raises:
        UsageError: the budget is not positive.
    """
    if token_budget < 1:
        raise UsageError(f"token budget is {token_budget}; it must be at least 1 token.")
    if len(num_tokens) and int(num_tokens.min()) < 1:
        raise ValueError("a sequence without tokens cannot be packed")
    by_length = np.argsort(-num_tokens, kind="stable")
    if padded:
        rows, bounds = by_length, _rectangle_bounds(num_tokens[by_length], token_budget)
    else:
        rows, bounds = _first_fit(num_tokens, by_length, token_budget)
    tokens_until = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(num_tokens[rows], out=tokens_until[1:])
    batch_tokens = np.diff(tokens_until[bounds])
    batch_slots = num_tokens[rows[bounds[:-1]]] * np.diff(bounds) if padded else batch_tokens
    return Packing(rows, bounds, batch_tokens, batch_slots, token_budget)


def _first_fit(
    num_tokens: npt.NDArray[np.int64], by_length: npt.NDArray[np.int64], token_budget: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and bounds of batches without padding."""
    lengths, counts = np.unique(num_tokens, return_counts=True)
    longer = len(num_tokens) - np.cumsum(counts)  # place in by_length where each length begins
    pieces, pieces_until = _fill_bins(lengths.tolist(), counts.tolist(), longer.tolist(), token_budget)
    first, taken = np.array(pieces, np.int64).reshape(-1, 2).T
    places, rows_until = concatenated_ranges(first, taken)
    return by_length[places], rows_until[np.array(pieces_until, np.int64)]


def _rectangle_bounds(descending: npt.NDArray[np.int64], token_budget: int) -> npt.NDArray[np.int64]:
    """Bounds of padded batches of rows that are sorted by length, the longest first."""
    bounds = [0]
    while bounds[-1] < len(descending):
        count = max(1, token_budget // int(descending[bounds[-1]]))
        bounds.append(min(bounds[-1] + count, len(descending)))
    return np.array(bounds, np.int64)


def iter_batches(tokens: TokenColumn, packing: Packing) -> Iterator[PackedBatch]:
    """Yields the batches of a packing, each gathered from the column when it is asked for."""
    starts, lengths = tokens.offsets[:-1], tokens.num_tokens
    for begin, end in zip(packing.bounds, packing.bounds[1:], strict=False):
        rows = packing.rows[begin:end]
        source, offsets = concatenated_ranges(starts[rows], lengths[rows])
        yield PackedBatch(tokens.input_ids[source], offsets.astype(np.int32), int(lengths[rows].max()), rows)


def warn_if_inefficient(model_name: str, efficiency: float, num_batches: int) -> None:
    """Logs a warning when batches are emptier than `EFFICIENCY_FLOOR`.

    A handful of batches is never warned of.

    Args:
        model_name: whose batches they are.
        efficiency: packing efficiency over all of them.
        num_batches: how many there were.
    """
    if num_batches >= _FEWEST_BATCHES and efficiency < EFFICIENCY_FLOOR:
        logger.warning(
            "%s: packing efficiency is %.0f %% over %d batches, below %.0f %%. Raise the token budget when "
            "sequences are nearly as long as it, lower it when the sequences of a shard fill few batches.",
            model_name,
            100 * efficiency,
            num_batches,
            100 * EFFICIENCY_FLOOR,
        )


def _fill_bins(
    lengths: list[int], counts: list[int], places: list[int], budget: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Fills one bin after another with the longest remaining lengths that fit.

    Args:
        lengths: distinct lengths, ascending; consumed.
        counts: sequences of each length; consumed.
        places: where the sequences of each length begin in the order by length; consumed.
        budget: most tokens of a bin of more than one sequence.

    Returns:
        The pieces of all bins as (place, number of sequences), and the number of pieces up to each bin,
        0 first.
    """
    pieces: list[tuple[int, int]] = []
    pieces_until = [0]
    while lengths:
        room = max(budget, lengths[-1])
        at = len(lengths) - 1
        while at >= 0:
            taken = min(counts[at], room // lengths[at])
            pieces.append((places[at], taken))
            room -= taken * lengths[at]
            counts[at] -= taken
            places[at] += taken
            if counts[at] == 0:
                del lengths[at], counts[at], places[at]
            at = bisect_right(lengths, room, hi=at) - 1
        pieces_until.append(len(pieces))
    return pieces, pieces_until
