"""Builds the index of a head's training genomes (`virnuc_core.results.nearest`) from pieces of labelled genomes.

Used by `virnuc train` and by the training of the bundled models. Shape legend: P pieces, G genomes, Z width of an embedding.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from virnuc_core.models.contig_head import ContigHead
from virnuc_core.plain_text import cell_text
from virnuc_core.results.contig_scores import score_contigs
from virnuc_core.results.nearest import (
    LEAST_CHUNKS,
    RANKS,
    GenomeIndex,
    choose_representatives,
    fit_cuts,
    fit_unsure_above,
)
from virnuc_core.training.contigs import LabelledRuns, cut_runs

_MOST_PIECES: Final = 20_000
_MOST_OF_GROUP: Final = 500
# 1 - cosine within which one piece of a group stands for another.
_TOLERANCE: Final = 0.01
# Of the lineages that the nearest genome gives to held-out contigs.
_PRECISION: Final = 0.9
# Numbers of chunks from which pieces are of another kind.
_LENGTH_CLASSES: Final = (2, 6)

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledPieces:
    """P pieces of G genomes; a genome may have none.

    Attributes:
        embeddings: fp32 (P, Z).
        genome: int64 (P,), row of the genome of each piece.
        num_chunks: int64 (P,); pieces of a group stand only for others of about as many.
        names: of the G genomes.
        lineages: G labels for each of `RANKS`, "" where unknown.
        groups: int64 (G,), related genomes share one.
    """

    embeddings: npt.NDArray[np.float32]
    genome: Int64
    num_chunks: Int64
    names: Sequence[str]
    lineages: Mapping[str, Sequence[str]]
    groups: Int64

    def take(self, rows: Int64) -> "LabelledPieces":
        """Selects pieces."""
        return replace(
            self,
            embeddings=self.embeddings[rows],
            genome=self.genome[rows],
            num_chunks=self.num_chunks[rows],
        )

    def joined(self, other: "LabelledPieces") -> "LabelledPieces":
        """These pieces, and then those of other genomes."""
        return LabelledPieces(
            embeddings=np.concatenate((self.embeddings, other.embeddings)),
            genome=np.concatenate((self.genome, other.genome + len(self.names))),
            num_chunks=np.concatenate((self.num_chunks, other.num_chunks)),
            names=(*self.names, *other.names),
            lineages={rank: (*self.lineages[rank], *other.lineages[rank]) for rank in RANKS},
            groups=np.concatenate((self.groups, other.groups + self.groups.max(initial=-1) + 1)),
        )

    @property
    def labels(self) -> dict[str, list[str]]:
        """P labels for each of `RANKS`."""
        return {rank: [self.lineages[rank][row] for row in self.genome.tolist()] for rank in RANKS}

    def index(self, head: str) -> GenomeIndex:
        """An index of all pieces; `head` is the digest of the head that the embeddings come from."""
        names = [cell_text(self.names[row]) for row in self.genome.tolist()]
        labels = {rank: list(map(cell_text, values)) for rank, values in self.labels.items()}
        return GenomeIndex.build(self.embeddings, names, labels, head)


def build_index(train: LabelledPieces, held_out: LabelledPieces, head: str, seed: int = 0) -> GenomeIndex:
    """The index of a head: at most about 20,000 pieces of the genomes that it was trained on.

    Its limits are fitted on genomes that were held out in whole groups, one piece of each; the cuts, on pieces of at least
    `LEAST_CHUNKS`. Groups that are known do not occur among them; so for the cuts, half of the genomes of every other group that
    has several count as indexed.

    Args:
        train: pieces of the genomes, at least one.
        held_out: pieces of others.
        head: digest of the head.
        seed: of the choice of held-out pieces.
    """
    chosen = train.take(_representatives(train))
    index = chosen.index(head)
    rng, is_known = np.random.default_rng(seed), _known_genomes(held_out)
    queries = held_out.take(_one_of_each(held_out.genome, rng))
    is_asked = (held_out.num_chunks >= LEAST_CHUNKS) & ~is_known[held_out.genome]
    asked = held_out.take(np.flatnonzero(is_asked))
    asked = asked.take(_one_of_each(asked.genome, rng))
    known = held_out.take(np.flatnonzero(is_known[held_out.genome]))
    trial = chosen.joined(known.take(_representatives(known))).index(head)
    # Labels as they are in the index.
    labels = {rank: list(map(cell_text, values)) for rank, values in asked.labels.items()}
    cuts = fit_cuts(trial, trial.search(asked.embeddings), labels, _PRECISION).cuts
    limit = fit_unsure_above(index.search(queries.embeddings).novelty)
    _log.info(
        "index: %d pieces of %d genomes; least similarity of the same %s, from %d held-out genomes; unsure above %s",
        len(index),
        len(index.names.values),
        ", ".join(f"{rank} {cut}" for rank, cut in zip(RANKS, cuts, strict=True)),
        len(asked.genome),
        limit,
    )
    return replace(index, cuts=cuts, unsure_above=limit)


def _representatives(pieces: LabelledPieces) -> Int64:
    """Rows of at most about _MOST_PIECES pieces, alike many of each group and kind of length as far as there are."""
    if not len(pieces.genome):
        return np.empty(0, np.int64)
    kinds = np.digitize(pieces.num_chunks, _LENGTH_CLASSES)
    strata = pieces.groups[pieces.genome] * (len(_LENGTH_CLASSES) + 1) + kinds
    _, counts = np.unique(strata, return_counts=True)
    fitting = (
        most for most in range(_MOST_OF_GROUP, 1, -1) if np.minimum(counts, most).sum() <= _MOST_PIECES
    )
    rows = choose_representatives(pieces.embeddings, strata, next(fitting, 1), _TOLERANCE)
    # With more strata than places, evenly spread ones.
    kept = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_PIECES)).astype(np.int64)
    return np.asarray(rows[kept])


def _one_of_each(genome: Int64, rng: np.random.Generator) -> Int64:
    """Ascending rows of pieces, one for each genome that has any; those of one genome agree with each other."""
    order = rng.permutation(len(genome))
    return np.sort(order[np.unique(genome[order], return_index=True)[1]])


def _known_genomes(pieces: LabelledPieces) -> Bool:
    """Bool (G,): every other genome of every other group that has pieces of several."""
    genomes = np.unique(pieces.genome)
    _, number, counts = np.unique(pieces.groups[genomes], return_inverse=True, return_counts=True)
    several = np.flatnonzero(counts > 1)[::2]
    is_known = np.zeros(len(pieces.names), np.bool_)
    for group in several.tolist():
        is_known[genomes[number == group][::2]] = True
    return is_known


def embed_pieces(
    head: ContigHead, runs: LabelledRuns, seed: int = 0
) -> tuple[npt.NDArray[np.float32], Int64, Int64]:
    """Cuts runs into pieces of 1 to 24 chunks and embeds these; also gives the run and the chunks of each, int64 (P,)."""

    def read_codes(begin: int, end: int) -> npt.NDArray[np.float16]:
        rows = slice(begin, end)
        features, sizes = torch.from_numpy(runs.features[rows]), torch.from_numpy(runs.sizes[rows])
        return np.asarray(head.score_rows(features, sizes)[1].numpy())

    pieces = list(cut_runs(runs.first_chunk, np.random.default_rng(seed)))
    lengths = np.array([end - first for _, (first, end) in pieces], np.int64)
    row_chunk = np.repeat(np.arange(len(runs.first_row) - 1), np.diff(runs.first_row))
    chunk_piece = np.repeat(np.arange(len(pieces)), lengths)
    scores = score_contigs(head, read_codes, row_chunk, chunk_piece, len(pieces))
    run = np.array([run for run, _ in pieces], np.int64)
    return scores.embedding, run, lengths
