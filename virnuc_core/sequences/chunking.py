"""Cutting records into overlapping chunks of about one length, the way VirNucPro does."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import UsageError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """n chunks in order of record and position; all columns int64 (n,).

    Attributes:
        record: row of the record.
        index: 0-based place of the chunk in its record.
        start: first base, 0-based, in the record.
        end: one past the last base.
    """

    record: Int64
    index: Int64
    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.record)


def chunk_table(lengths: Int64, chunk_length: int) -> ChunkTable:
    """Cuts records of the given lengths into chunks.

    A record of L bases gives n = ceil(L / chunk_length) chunks that cover all of it; the surplus
    n * chunk_length - L is shared out as overlaps between neighbours. The last chunk is often shorter.

    Args:
        lengths: int64 (R,), bases of each record, at least 1.
        chunk_length: bases of a chunk.

    Raises:
        UsageError: `chunk_length` is below 1.

    Source: VirNucPro, `split_fasta_chunk`: overlaps are base + 1 for the first `longer` chunks and base
    for the others, so that chunk i is shifted back by i * base + min(i, longer).
    """
    if chunk_length < 1:
        raise UsageError(f"The chunk length is {chunk_length} bp; it must be at least 1.")
    counts = -(-lengths // chunk_length)
    surplus = counts * chunk_length - lengths
    base = surplus // np.maximum(counts, 1)
    longer = surplus - base * (counts - 1)

    record = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    index = np.arange(len(record), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    start = index * (chunk_length - base[record]) - np.minimum(index, longer[record])
    end = np.minimum(start + chunk_length, lengths[record])
    return ChunkTable(record, index, start, end)
