"""Training, validation and test records: related records stay in one part, and frames are sampled evenly.

Records are related when they share enough sampled 21-mers, on either strand. The sample, the k-mers with the smallest hashes,
is the same for every record, so that a fragment is matched to its genome.
"""

import hashlib
import logging
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from virnuc_core.columns import Bool, Float64, Int64, concatenated_ranges
from virnuc_core.errors import InputError

UInt64 = npt.NDArray[np.uint64]

PARTS: Final = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)

KMER_LENGTH: Final = 21
# Minimum share of the shorter record's sampled k-mers that the longer one must have. Genomes that differ in every 13th base
# share about a fifth of their 21-mers.
MIN_SHARED_KMERS: Final = 0.2

_CODES: Final = np.full(256, 4, np.uint8)
_CODES[list(b"ACGT")] = range(4)

_log = logging.getLogger(__name__)


def split_records(
    is_viral: Bool, groups: Int64, is_usable: Bool, holdout_fraction: float, seed: int
) -> npt.NDArray[np.int8]:
    """Assigns whole groups of the R records to parts: int8 (R,), index into `PARTS`.

    `holdout_fraction` (below 0.5) of the groups of each class go to validation and as many to the test, at least one to each.
    Groups with both classes are used for training: a virus in the genome of its host is uninformative in a test.
    """
    both = np.intersect1d(groups[is_viral], groups[~is_viral])
    if len(both):
        _log.warning(
            "%d groups of related records contain viral and other records, such as a prophage and its host: they are used for "
            "training only",
            len(both),
        )
    part = np.full(len(groups), TRAIN, np.int8)
    rng = np.random.default_rng(seed)
    for viral, name in ((True, "viral"), (False, "other")):
        own = np.setdiff1d(groups[(is_viral == viral) & is_usable], both)
        if len(own) < 3:
            raise InputError(
                f"too few records to train on: {len(own)} groups of related, usable {name} records, and at least 3 are needed, "
                f"one each for training, validation and test. Give more dissimilar --{name} records."
            )
        each = min(max(1, round(holdout_fraction * len(own))), (len(own) - 1) // 2)
        permuted = rng.permutation(own)
        part[np.isin(groups, permuted[:each])] = VALIDATION
        part[np.isin(groups, permuted[each : 2 * each])] = TEST
    return part


def sample_weights(is_viral: Bool, groups: Int64, sampling_exponent: float) -> Float64:
    """Sampling probability of each frame, float64 (n,), sums to 1; `is_viral` and `groups` (not negative) are (n,).

    Viral and other frames get half each. Within a half, a group of m frames is sampled in proportion to m ** sampling_exponent,
    so that much-sequenced groups do not dominate: 1 weighs frames equally, 0 groups.
    """
    size = np.maximum(np.bincount(groups), 1)
    weights: Float64 = (size.astype(float) ** (sampling_exponent - 1))[groups]
    for half in (is_viral, ~is_viral):
        weights[half] *= 0.5 / weights[half].sum()
    return weights


def kept_share(weights: Float64, max_frames: int) -> Float64:
    """float64 (n,): probability with which each frame is to be kept, so that about `max_frames` are."""
    if len(weights) <= max_frames:
        return np.ones(len(weights))
    share = np.minimum(1.0, max_frames * weights)
    for _ in range(20):  # redistributes what is clipped at 1
        share = np.minimum(1.0, share * max_frames / share.sum())
    return np.asarray(share)


class KinshipSketches:
    """Sampled k-mers of records, added one by one: one in 16, fewer if that would exceed `max_samples`.

    `max_pairs` bounds the time to some minutes where very many unrelated records share a k-mer.
    """

    def __init__(self, max_samples: int = 1 << 25, max_pairs: int = 1 << 29) -> None:
        self._max_samples = max_samples
        self._max_pairs = max_pairs
        self._limit = (1 << 64) // 16
        self._samples: list[UInt64] = []
        self._digests: list[int] = []
        self._lengths: list[int] = []
        self._num_samples = 0

    def add(self, sequence: bytes) -> int:
        """Adds a record of upper-case bases; returns a digest that is the same for both strands."""
        digest = _strandless_digest(sequence)
        sample = sampled_kmers(sequence, self._limit)
        self._samples.append(sample)
        self._digests.append(digest)
        self._lengths.append(len(sequence))
        self._num_samples += len(sample)
        while self._num_samples > self._max_samples:
            self._limit //= 2
            self._samples = [kept[kept < self._limit] for kept in self._samples]
            self._num_samples = sum(map(len, self._samples))
        return digest

    def groups(self) -> Int64:
        """int64 (R,): connected components of the related records."""
        num_records = len(self._samples)
        longest_first = np.argsort(-np.array(self._lengths, np.int64), kind="stable")
        # The record's digest is one of the samples, so that identical records are related however short they are.
        samples = [np.append(self._samples[i], np.uint64(self._digests[i])) for i in longest_first]
        sizes = np.array([len(sample) for sample in samples], np.int64)
        hashes = np.concatenate(samples) if samples else np.zeros(0, np.uint64)
        # Records are numbered by decreasing length: of two, the one with the higher number is the shorter.
        record = np.repeat(np.arange(num_records), sizes)
        order = np.argsort(hashes, kind="stable")
        record, hashes = record[order], hashes[order]

        # First link each record to the longest one with the same k-mer: linear, and it joins most near-duplicates, which would
        # give the most pairs.
        owner = record[np.searchsorted(hashes, hashes)]
        links = [_related(record, owner, sizes)]
        found = _components(*links[0], num_records)
        links += _links_between(record, hashes, found, self._max_pairs)
        shorter, longer = (np.concatenate(side) for side in zip(*links, strict=True))
        groups = np.empty(num_records, np.int64)
        groups[longest_first] = _components(shorter, longer, num_records)
        return groups


def join_groups(first: Int64, second: Int64) -> Int64:
    """Groups (R,) that join records which share a group in either grouping (R,)."""
    records = np.arange(len(first))
    heads = [np.unique(groups, return_index=True, return_inverse=True) for groups in (first, second)]
    linked = np.concatenate([where[inverse] for _, where, inverse in heads])
    return _components(np.concatenate([records, records]), linked, len(first))


def sampled_kmers(sequence: bytes, limit: int) -> UInt64:
    """Distinct hashes below `limit` of all 21-mers of ACGT only; a 21-mer is hashed on the strand where it is smaller."""
    found = [np.zeros(0, np.uint64)]
    block_bases = 1 << 22
    for begin in range(0, len(sequence) - KMER_LENGTH + 1, block_bases):
        block = np.frombuffer(sequence[begin : begin + block_bases + KMER_LENGTH - 1], np.uint8)
        codes = _CODES[block]
        odd = np.append(0, np.cumsum(codes == 4))
        is_clean = odd[KMER_LENGTH:] == odd[:-KMER_LENGTH]
        bases = (codes & 3).astype(np.uint64)
        forward, reverse = _words(bases), _words((3 - bases)[::-1])[::-1]
        hashes = _mixed(np.minimum(forward, reverse))
        found.append(hashes[is_clean & (hashes < limit)])
    return np.unique(np.concatenate(found))


def _words(bases: UInt64) -> UInt64:
    """uint64 (n - 20,): the 21 two-bit codes from each of n positions on, packed into one number."""
    words = np.zeros(len(bases) - KMER_LENGTH + 1, np.uint64)
    for place in range(KMER_LENGTH):
        words = words << np.uint64(2) | bases[place : place + len(words)]
    return words


def _mixed(words: UInt64) -> UInt64:
    """The finalizer of SplitMix64, as a hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _related(shorter: Int64, longer: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """Distinct pairs (n,), (n,) with enough shared k-mers, given one pair per shared k-mer and `sizes` (R,) in k-mers."""
    pairs, counts = np.unique(shorter * len(sizes) + longer, return_counts=True)
    shorter, longer = np.divmod(pairs, max(len(sizes), 1))
    is_related = counts >= MIN_SHARED_KMERS * sizes[shorter]
    return shorter[is_related], longer[is_related]


def _links_between(
    record: Int64, hashes: UInt64, groups: Int64, max_pairs: int
) -> Iterator[tuple[Int64, Int64]]:
    """Pairs (n,), (n,) of related records in different groups.

    All pairs that share a k-mer are counted, up to `max_pairs`; beyond that only those that share one of the smallest hashes,
    which are a random sample. `record` and the ascending `hashes` are (N,), of sampled k-mers of records numbered by decreasing
    length; `groups` is (R,).
    """
    record = record[np.lexsort((groups[record], hashes))]
    # A k-mer is paired with the same k-mer in the records of all later groups.
    begin, end = _ends_of_runs(hashes, groups[record]), _ends_of_runs(hashes)
    partners = end - begin
    num_counted = int(np.searchsorted(np.cumsum(partners), max_pairs, side="right"))
    if num_counted < len(hashes):
        num_counted = int(np.searchsorted(hashes, hashes[num_counted]))
    sizes = np.bincount(record[:num_counted], minlength=len(groups))
    meeting = np.flatnonzero(partners[:num_counted])
    meeting = meeting[np.argsort(record[meeting], kind="stable")]
    # A block holds all k-mers of its records. A single record gives at most N pairs: its k-mers are distinct.
    total = np.cumsum(np.bincount(record[meeting], partners[meeting], len(groups)))
    block = total[record[meeting]] // (1 << 22)
    for rows in np.split(meeting, np.flatnonzero(np.diff(block)) + 1):
        met, _ = concatenated_ranges(begin[rows], partners[rows])
        one, other = np.repeat(record[rows], partners[rows]), record[met]
        yield _related(np.maximum(one, other), np.minimum(one, other), sizes)


def _ends_of_runs(*columns: Int64 | UInt64) -> Int64:
    """int64 (N,): for each row, the end (exclusive) of its run of rows that are equal in all columns."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    ends = np.append(np.flatnonzero(changes) + 1, len(columns[0]))
    return np.repeat(ends, np.diff(ends, prepend=0))


def _strandless_digest(sequence: bytes) -> int:
    complement = sequence.translate(bytes.maketrans(b"ACGT", b"TGCA"))
    strand = min(sequence, complement[::-1])
    return int.from_bytes(hashlib.blake2b(strand, digest_size=8).digest(), "little")


def _components(left: Int64, right: Int64, count: int) -> Int64:
    edges = coo_array((np.ones(len(left), np.int8), (left, right)), shape=(count, count))
    return np.asarray(connected_components(edges, directed=False)[1], np.int64)
