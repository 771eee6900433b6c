"""Synthetic relatives of real frames: synonymous codons and similar residues, with a random GC preference per frame.

A model trained on them cannot rely on the codon usage or base composition of the training genomes.
"""

import numpy as np
import numpy.typing as npt
from Bio.Align import substitution_matrices

from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frames import open_frames

_CODONS = np.array([[a, b, c] for a in b"ACGT" for b in b"ACGT" for c in b"ACGT"], np.uint8)
_BLOCK_FRAMES = 4096
_GC_TASTE = 0.7
_SIMILARITY = 0.5


def _residue_of_codons() -> npt.NDArray[np.uint8]:
    """uint8 (64,): amino acid of each codon, 0 for a stop."""
    starts = 3 * np.arange(64)
    frames = open_frames(_CODONS.ravel(), starts, starts + 3)
    residues = np.zeros(64, np.uint8)
    forward = frames.frame == 0
    residues[frames.chunk[forward]] = frames.protein.data[frames.protein.offsets[:-1][forward]]
    return residues


def _codon_weights(residues: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Log weight of every codon for every residue byte, float64 (2, 256, 64).

    [0] allows synonymous codons only; [1] only those of other residues, by their BLOSUM62 score.
    """
    blosum = substitution_matrices.load("BLOSUM62")
    weights = np.full((2, 256, 64), -np.inf)
    for residue in set(residues.tolist()) - {0}:
        synonymous = residues == residue
        weights[0, residue, synonymous] = 0.0
        for codon in np.flatnonzero(~synonymous & (residues > 0)):
            weights[1, residue, codon] = _SIMILARITY * blosum[chr(residue)][chr(residues[codon])]
    return weights


def recode(
    dna: ByteColumn, protein: ByteColumn, recoded: float, substituted: float, rng: np.random.Generator
) -> tuple[ByteColumn, ByteColumn]:
    """Resamples the codons of each frame.

    Frames with letters other than ACGT are unchanged; lengths always are.

    Args:
        dna: nucleotides of each frame, 3 per residue and up to one more.
        protein: their translations.
        recoded: share of codons replaced by a synonymous one.
        substituted: mean share of residues replaced by a similar one; each frame samples its own from 0 to twice that.
        rng: random generator.
    """
    residues = _residue_of_codons()
    log_weights = _codon_weights(residues)
    gc = np.isin(_CODONS, list(b"GC")).sum(1)
    ambiguous = np.add.reduceat(~np.isin(dna.data, list(b"ACGT")), dna.offsets[:-1]) > 0
    usable = np.flatnonzero(~ambiguous & (dna.lengths // 3 == protein.lengths))
    bases, letters = dna.data.copy(), protein.data.copy()
    for rows in np.array_split(usable, max(1, len(usable) // _BLOCK_FRAMES)):
        lengths = protein.lengths[rows]
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        where = np.repeat(protein.offsets[rows], lengths) + place
        starts = np.repeat(dna.offsets[rows], lengths) + 3 * place
        swapped = rng.random(len(place)) < np.repeat(rng.uniform(0, 2 * substituted, len(rows)), lengths)
        taste = np.repeat(rng.normal(0, _GC_TASTE, len(rows)), lengths)
        chosen = np.flatnonzero(swapped | (rng.random(len(place)) < recoded))
        # Gumbel-max trick: samples one codon in proportion to the weights.
        weights = log_weights[swapped[chosen].astype(int), protein.data[where[chosen]]]
        weights = weights + taste[chosen, None] * gc + rng.gumbel(size=weights.shape)
        codons = weights.argmax(1)
        bases[starts[chosen, None] + np.arange(3)] = _CODONS[codons]
        letters[where[chosen]] = residues[codons]
    return ByteColumn(bases, dna.offsets), ByteColumn(letters, protein.offsets)
