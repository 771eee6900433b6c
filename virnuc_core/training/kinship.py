"""Which records are too much alike to stand on both sides of a split.

Records are compared by a sample of their 21-mers, on either strand: the sample is the same k-mers for every record,
those whose hash is small, so that a fragment is found in the genome that it was cut from.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from virnuc_core.columns import concatenated_ranges

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

KMER_LENGTH: Final = 21
# Share of a record's sampled k-mers that a longer record has, too, from which on the two are kin; of two genomes that
# differ in every 13th base, about a fifth of the 21-mers are the same.
KIN_SHARE: Final = 0.2
# One k-mer in 16 is sampled, and fewer where this many would not hold them.
_SAMPLED: Final = 16
_MOST_SAMPLES: Final = 1 << 25
_BLOCK_BASES: Final = 1 << 22
# Bounds the time where very many unrelated records share a k-mer: some minutes.
_MOST_PAIRS: Final = 1 << 29
_BLOCK_PAIRS: Final = 1 << 22

_CODES: Final = np.full(256, 4, np.uint8)
_CODES[list(b"ACGT")] = range(4)
_COMPLEMENT: Final = bytes.maketrans(b"ACGT", b"TGCA")


class KinshipSketches:
    """Samples of the k-mers of records, taken one record after another."""

    def __init__(self, most_samples: int = _MOST_SAMPLES) -> None:
        self._most_samples = most_samples
        self._limit = (1 << 64) // _SAMPLED
        self._samples: list[UInt64] = []
        self._digests: list[int] = []
        self._lengths: list[int] = []
        self._num_samples = 0

    def add(self, sequence: bytes) -> int:
        """Notes the next record.

        Args:
            sequence: upper-case bases.

        Returns:
            A number that is the same for the same sequence, on either strand.
        """
        digest = _strandless_digest(sequence)
        sample = sampled_kmers(sequence, self._limit)
        self._samples.append(sample)
        self._digests.append(digest)
        self._lengths.append(len(sequence))
        self._num_samples += len(sample)
        while self._num_samples > self._most_samples:
            self._limit //= 2
            self._samples = [kept[kept < self._limit] for kept in self._samples]
            self._num_samples = sum(map(len, self._samples))
        return digest

    def groups(self) -> Int64:
        """int64 (R,): records that are kin, or kin of kin, have the same number."""
        num_records = len(self._samples)
        longest_first = np.argsort(-np.array(self._lengths, np.int64), kind="stable")
        # The digest of the whole stands among the samples, so that equal records are kin however short they are.
        samples = [np.append(self._samples[i], np.uint64(self._digests[i])) for i in longest_first]
        sizes = np.array([len(sample) for sample in samples], np.int64)
        hashes = np.concatenate(samples) if samples else np.zeros(0, np.uint64)
        # Records are numbered from the longest on: of two, the one with the higher number is the shorter.
        record = np.repeat(np.arange(num_records), sizes)
        order = np.argsort(hashes, kind="stable")
        record, hashes = record[order], hashes[order]

        # First each record with the longest that has its k-mer: linear, and it joins most of the near-duplicates, whose
        # pairs are the many.
        owner = record[np.searchsorted(hashes, hashes)]
        links = [_kin(record, owner, sizes)]
        found = _components(*links[0], num_records)
        links += _links_between(record, hashes, found)
        shorter, longer = (np.concatenate(side) for side in zip(*links, strict=True))
        groups = np.empty(num_records, np.int64)
        groups[longest_first] = _components(shorter, longer, num_records)
        return groups


def join_groups(first: Int64, second: Int64) -> Int64:
    """Groups (R,) in which records are together that are so in one of two groupings (R,)."""
    return _components(*_links(first, second), len(first))


def sampled_kmers(sequence: bytes, limit: int) -> UInt64:
    """The distinct hashes below `limit` of all 21-mers of ACGT alone, each on the strand where it is smaller."""
    found = [np.zeros(0, np.uint64)]
    for begin in range(0, len(sequence) - KMER_LENGTH + 1, _BLOCK_BASES):
        block = np.frombuffer(sequence[begin : begin + _BLOCK_BASES + KMER_LENGTH - 1], np.uint8)
        codes = _CODES[block]
        odd = np.append(0, np.cumsum(codes == 4))
        is_clean = odd[KMER_LENGTH:] == odd[:-KMER_LENGTH]
        bases = (codes & 3).astype(np.uint64)
        forward, reverse = _words(bases), _words((3 - bases)[::-1])[::-1]
        hashes = _mixed(np.minimum(forward, reverse))
        found.append(hashes[is_clean & (hashes < limit)])
    return np.unique(np.concatenate(found))


def _words(one: UInt64) -> UInt64:
    """uint64 (n - 20,): the 21 two-bit codes from each of n places on, as one number."""
    two = _joined(one, one[1:], 1)
    four = _joined(two, two[2:], 2)
    sixteen = _joined(_joined(four, four[4:], 4), _joined(four, four[4:], 4)[8:], 8)
    return _joined(_joined(sixteen, four[16:], 4), one[20:], 1)


def _joined(left: UInt64, right: UInt64, letters: int) -> UInt64:
    """Each word with the word of so many letters on its right behind it."""
    count = min(len(left), len(right))
    return np.asarray(left[:count] << np.uint64(2 * letters) | right[:count], np.uint64)


def _mixed(words: UInt64) -> UInt64:
    """The finalizer of SplitMix64: neighbouring numbers become unrelated ones."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _kin(shorter: Int64, longer: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """The distinct pairs (n,), (n,) among pairs of records, one for each shared k-mer, that share enough of them.

    Args:
        shorter: int64 (P,), the shorter record of each pair.
        longer: int64 (P,), the other.
        sizes: int64 (R,), sampled k-mers of each record.
    """
    pairs, counts = np.unique(shorter * len(sizes) + longer, return_counts=True)
    shorter, longer = np.divmod(pairs, max(len(sizes), 1))
    is_kin = counts >= KIN_SHARE * sizes[shorter]
    return shorter[is_kin], longer[is_kin]


def _links_between(record: Int64, hashes: UInt64, groups: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Pairs (n,), (n,) of records that are kin and in different groups.

    Every pair that shares a k-mer is counted, as long as these are at most `_MOST_PAIRS` in all; beyond that, those
    that share one of the smallest hashes, which are a sample of all.

    Args:
        record: int64 (N,), record of each sampled k-mer, numbered from the longest on.
        hashes: uint64 (N,), the k-mers, ascending.
        groups: int64 (R,), group of each record.
    """
    record = record[np.lexsort((groups[record], hashes))]
    # A k-mer of one record meets the same k-mer in the records of all later groups.
    begin, end = _ends_of_runs(hashes, groups[record]), _ends_of_runs(hashes)
    partners = end - begin
    num_counted = int(np.searchsorted(np.cumsum(partners), _MOST_PAIRS, side="right"))
    if num_counted < len(hashes):
        num_counted = int(np.searchsorted(hashes, hashes[num_counted]))
    sizes = np.bincount(record[:num_counted], minlength=len(groups))
    meeting = np.flatnonzero(partners[:num_counted])
    meeting = meeting[np.argsort(record[meeting], kind="stable")]
    # A block holds all k-mers of its records. One record alone meets no k-mer twice: at most N pairs.
    total = np.cumsum(np.bincount(record[meeting], partners[meeting], len(groups)))
    block = total[record[meeting]] // _BLOCK_PAIRS
    for rows in np.split(meeting, np.flatnonzero(np.diff(block)) + 1):
        met, _ = concatenated_ranges(begin[rows], partners[rows])
        one, other = np.repeat(record[rows], partners[rows]), record[met]
        yield _kin(np.maximum(one, other), np.minimum(one, other), sizes)


def _ends_of_runs(*columns: Int64 | UInt64) -> Int64:
    """int64 (N,): for each row, one past the last of the neighbouring rows that have the same values in all columns."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    ends = np.append(np.flatnonzero(changes) + 1, len(columns[0]))
    return np.repeat(ends, np.diff(ends, prepend=0))


def _strandless_digest(sequence: bytes) -> int:
    strand = min(sequence, sequence.translate(_COMPLEMENT)[::-1])
    return int.from_bytes(hashlib.blake2b(strand, digest_size=8).digest(), "little")


def _links(first: Int64, second: Int64) -> tuple[Int64, Int64]:
    """Pairs of records (n,), (n,) that connect all records of every group of either grouping."""
    records = np.arange(len(first))
    heads = [np.unique(groups, return_index=True, return_inverse=True) for groups in (first, second)]
    return np.concatenate([records, records]), np.concatenate([where[inverse] for _, where, inverse in heads])


def _components(left: Int64, right: Int64, count: int) -> Int64:
    edges = coo_array((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
    return np.asarray(connected_components(edges, directed=False)[1], np.int64)
