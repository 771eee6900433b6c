"""Viruses and plasmids that are relatives by their proteins: their names say little of it, and many have none."""

from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from scripts.train_bundled.genomes import Genomes
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frames import chunk_table, longest_orfs

Int64 = npt.NDArray[np.int64]

_KMER_LENGTH: Final = 8
_SAMPLED: Final = 8  # one k-mer in so many
# Relatives share at least this share of the sampled k-mers of the one with fewer, and at least so many.
_MIN_SHARE: Final = 0.1
_MIN_KMERS: Final = 3
_CHUNK_BASES: Final = 1000
_BLOCK_CHUNKS: Final = 20_000
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


def relatives(genomes: Genomes) -> Int64:
    """Groups of relatives, int64 (R,): of viruses and plasmids by shared proteins, of others the genomes' own groups."""
    replicons = np.flatnonzero(np.isin(genomes.sources, ("viral", "plasmid")))
    groups = genomes.groups.copy()
    groups[replicons] = groups.max(initial=0) + 1 + _by_proteins(genomes.bases.take(replicons))
    return groups


def _by_proteins(bases: ByteColumn) -> Int64:
    """Connected components (R,) of the records that share k-mers of their ORFs."""
    record, kmer = _sampled_kmers(bases)
    _, column = np.unique(kmer, return_inverse=True)
    has = csr_array((np.ones(len(record), np.int32), (record, column)), (len(bases), len(kmer)))
    shared, counts = (has @ has.T).tocoo(), np.diff(has.indptr)
    least = np.maximum(_MIN_KMERS, _MIN_SHARE * np.minimum(counts[shared.row], counts[shared.col]))
    is_link = shared.data >= least
    links = csr_array(
        (np.ones(is_link.sum(), np.bool_), (shared.row[is_link], shared.col[is_link])), shared.shape
    )
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def _sampled_kmers(bases: ByteColumn) -> tuple[Int64, npt.NDArray[np.uint64]]:
    """Records and hashes, (n,) each, of the k-mers that are sampled, each once a record."""
    table = chunk_table(bases.lengths, _CHUNK_BASES)
    starts = bases.offsets[table.record] + table.start
    ends = bases.offsets[table.record] + table.end
    records, kmers = [], []
    for first in range(0, len(starts), _BLOCK_CHUNKS):
        block = slice(first, first + _BLOCK_CHUNKS)
        left, right = int(starts[block].min()), int(ends[block].max())
        rows = longest_orfs(bases.data[left:right], starts[block] - left, ends[block] - left)
        hashes = np.zeros(max(0, len(rows.protein.data) - _KMER_LENGTH + 1), np.uint64)
        for place in range(_KMER_LENGTH):
            hashes = (hashes + rows.protein.data[place : place + len(hashes)]) * _MULTIPLIER
        row = np.repeat(np.arange(len(rows.chunk)), rows.protein.lengths)[: len(hashes)]
        is_within = np.arange(len(hashes)) + _KMER_LENGTH <= rows.protein.offsets[1:][row]
        kept = np.flatnonzero(is_within & ((hashes >> np.uint64(32)) % np.uint64(_SAMPLED) == 0))
        records.append(table.record[block][rows.chunk[row[kept]]])
        kmers.append(hashes[kept])
    found = np.unique(np.stack((np.concatenate(records).astype(np.uint64), np.concatenate(kmers))), axis=1)
    return found[0].astype(np.int64), found[1]
