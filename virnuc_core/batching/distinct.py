"""Which rows of a column are the same string, so that each is embedded once."""

from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import ByteColumn, concatenated_ranges

_WORD_BYTES: Final = 8
_SEED: Final = 0x5EED


def distinct_rows(column: ByteColumn) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Finds equal strings by a hash of their bytes, and compares them to be sure.

    Args:
        column: n strings.

    Returns:
        int64 (d,), the first row of each distinct string, ascending, and int64 (n,), which of these every
        row is equal to. Two strings that differ are never taken for one; two that are equal could be missed
        only where a third one has the same 64-bit hash.
    """
    if len(column) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    words, offsets = _words(column)
    rows = np.arange(len(column))
    _, first, group = np.unique(
        _hashes(words, offsets, column.lengths), return_index=True, return_inverse=True
    )
    first_row = first[group]
    repeated = np.flatnonzero(first_row != rows)
    if len(repeated) == 0:
        return rows, rows
    same = _equal(words, offsets, column.lengths, repeated, first_row[repeated])
    first_row[repeated[~same]] = repeated[~same]
    is_first = first_row == rows
    return np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[first_row]


def _words(column: ByteColumn) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The bytes of each row, 8 to a word, the last word filled up with zeros; and where each row begins."""
    begin, end = column.offsets[0], column.offsets[-1]
    padded = np.concatenate((column.data[begin:end], np.zeros(_WORD_BYTES, np.uint8)))
    at_every_byte = np.ndarray((len(padded) - _WORD_BYTES + 1,), np.uint64, padded.data, strides=(1,))
    lengths = column.lengths
    counts = -(-lengths // _WORD_BYTES)
    index, offsets = concatenated_ranges(np.zeros_like(counts), counts)
    index *= _WORD_BYTES
    index += np.repeat(column.offsets[:-1] - begin, counts)
    words = at_every_byte[index]
    filled = counts > 0
    unused_bits = (_WORD_BYTES * 8 - 8 * (lengths - _WORD_BYTES * (counts - 1)))[filled].astype(np.uint64)
    last = offsets[1:][filled] - 1
    all_bits = np.uint64(2**64 - 1)
    words[last] &= all_bits >> unused_bits if np.little_endian else all_bits << unused_bits
    return words, offsets


def _hashes(
    words: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """The uint64 (n,) sums of each row's words, each word times a random odd number of its place."""
    counts = np.diff(offsets)
    places = int(counts.max())
    factors = np.random.default_rng(_SEED).integers(2**64, size=places + 1, dtype=np.uint64) | np.uint64(1)
    within, _ = concatenated_ranges(np.zeros_like(counts), counts)
    until = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * factors[within], out=until[1:])
    hashes: npt.NDArray[np.uint64] = until[offsets[1:]] - until[offsets[:-1]]
    hashes += lengths.astype(np.uint64) * factors[places]
    return hashes


def _equal(
    words: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Whether row left[i] is row right[i], byte for byte: bool (m,)."""
    same: npt.NDArray[np.bool_] = lengths[left] == lengths[right]
    pairs = np.flatnonzero(same & (lengths[left] > 0))
    counts = np.diff(offsets)[left[pairs]]
    mine, bounds = concatenated_ranges(offsets[left[pairs]], counts)
    theirs, _ = concatenated_ranges(offsets[right[pairs]], counts)
    differing = np.zeros(len(mine) + 1, np.int64)
    np.cumsum(words[mine] != words[theirs], out=differing[1:])
    same[pairs] &= differing[bounds[1:]] == differing[bounds[:-1]]
    return same
