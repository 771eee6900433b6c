"""Synthetic relatives of real genes: synonymous codons and similar residues, with a random GC preference for each.

A model trained on them cannot rely on the codon usage or base composition of the training genomes.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from Bio.Align import substitution_matrices
from Bio.Data.CodonTable import unambiguous_dna_by_name

from virnuc_core.columns import ByteColumn

_RESIDUES: Final = "ACDEFGHIKLMNPQRSTVWY"
_CODONS: Final = tuple(a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT")
_GC_TASTE: Final = 0.7
_TASTES: Final = 33  # the preference is one of so many between -3 and 3 standard deviations
_SIMILARITY: Final = 0.5


@cache
def _residue_numbers() -> npt.NDArray[np.uint8]:
    """uint8 (256,): place of a letter in _RESIDUES."""
    numbers = np.zeros(256, np.uint8)
    numbers[list(_RESIDUES.encode())] = range(len(_RESIDUES))
    return numbers


@cache
def _codon_tables() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Cumulative weights (tastes, 20, 6) and bases (20, 6, 3) of the codons of each residue."""
    cumulative = np.ones((_TASTES, len(_RESIDUES), 6), np.float32)
    bases = np.zeros((len(_RESIDUES), 6, 3), np.uint8)
    standard = unambiguous_dna_by_name["Standard"].forward_table
    tastes = _GC_TASTE * np.linspace(-3, 3, _TASTES)
    for number, residue in enumerate(_RESIDUES):
        codons = [codon for codon in _CODONS if standard.get(codon) == residue]
        gc = np.array([sum(base in "GC" for base in codon) for codon in codons])
        weights = np.exp(tastes[:, None] * gc)
        cumulative[:, number, : len(codons)] = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
        bases[number, : len(codons)] = [list(codon.encode()) for codon in codons]
        bases[number, len(codons) :] = list(codons[-1].encode())
    return cumulative, bases


@cache
def _substitutions() -> npt.NDArray[np.float32]:
    """Cumulative weights (20, 20) of the residues that may take a residue's place, by their BLOSUM62 scores."""
    blosum = substitution_matrices.load("BLOSUM62")
    scores = np.array([[blosum[a][b] for b in _RESIDUES] for a in _RESIDUES])
    weights = np.exp(_SIMILARITY * scores)
    np.fill_diagonal(weights, 0.0)
    return np.asarray(np.cumsum(weights / weights.sum(1, keepdims=True), 1), np.float32)


def recode(
    dna: ByteColumn, protein: ByteColumn, recoded: float, substituted: float, rng: np.random.Generator
) -> tuple[ByteColumn, ByteColumn]:
    """Draws new codons for some of the residues of each ORF; lengths stay.

    Args:
        dna: nucleotides of each ORF, 3 per residue.
        protein: their translations, of the twenty residues.
        recoded: share of codons replaced by one of the same residue, possibly the same.
        substituted: mean share of residues replaced by a similar one; each ORF draws its own from 0 to twice that.
        rng: random generator.
    """
    lengths = protein.lengths
    residues = _residue_numbers()[protein.data]
    own_share = np.repeat(rng.uniform(0, 2 * substituted, len(lengths)).astype(np.float32), lengths)
    is_swapped = rng.random(len(residues), dtype=np.float32) < own_share
    swapped = np.flatnonzero(is_swapped)
    residues[swapped] = _draw(_substitutions()[residues[swapped]], rng)
    taste = np.clip(np.rint((rng.normal(0, 1, len(lengths)) + 3) / 6 * (_TASTES - 1)), 0, _TASTES - 1)
    tastes = np.repeat(taste.astype(np.int64), lengths)
    chosen = np.flatnonzero(is_swapped | (rng.random(len(residues), dtype=np.float32) < recoded))
    cumulative, codons = _codon_tables()
    numbers = _draw(cumulative[tastes[chosen], residues[chosen]], rng)
    bases = dna.data.reshape(-1, 3).copy()
    bases[chosen] = codons[residues[chosen], numbers]
    letters = np.frombuffer(_RESIDUES.encode(), np.uint8)[residues]
    return ByteColumn(bases.ravel(), dna.offsets), ByteColumn(letters, protein.offsets)


def _draw(cumulative: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draws a column for each row of cumulative weights (n, k)."""
    draws = rng.random(len(cumulative), dtype=np.float32)
    return np.asarray(np.minimum((draws[:, None] >= cumulative).sum(1), cumulative.shape[1] - 1))
