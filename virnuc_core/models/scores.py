"""What heads say of chunks and contigs, and what they say it from; without torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import Bool, Float32, Float64, Int64
from virnuc_core.specs import Confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """N rows of C chunks of R whole contigs, with what the head gave each row.

    Attributes:
        read: gives the values of a dataset, `scores` fp32 (n, 2) or `codes` fp16 (n, Z), of the rows begin..end-1.
        chunk: (N,) chunk of each row, ascending from 0.
        contig: (C,) contig of each chunk, ascending from 0.
        num_contigs: R.
    """

    read: Callable[[str, int, int], npt.NDArray[Any]]
    chunk: Int64
    contig: Int64
    num_contigs: int

    @property
    def first_rows(self) -> Int64:
        """int64 (S,): first row of each chunk with a row."""
        return np.flatnonzero(np.diff(self.chunk, prepend=-1))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigScores:
    """Scores of C chunks and R contigs: probabilities of a virus, NaN without a row.

    Attributes:
        p_chunk: (C,) of the chunk alone.
        p_region: (C,) that regions are found from.
        p_contig: (R,).
        is_novel: (R,) whether the contig is unlike all that the head was trained on.
        contig_classes: (R, 2) numbers of the most probable class that is no virus, and of the most probable virus; -1 without a row.
            None, like the following, of a head without classes.
        embedding: fp32 (R, 64) of length 1, NaN without a row.
        novelty: (R,) distance to the nearest centroid of the head, 1 - cosine, 0..2; NaN without a row or centroids.
    """

    p_chunk: Float64
    p_region: Float64
    p_contig: Float64
    is_novel: Bool
    contig_classes: Int64 | None = None
    embedding: Float32 | None = None
    novelty: Float64 | None = None


@dataclass(frozen=True, slots=True)
class ConfidenceRule:
    """Minimum number of scored chunks, minimum probability of the call, and minimum share of the scored chunks with the same call."""

    confidence: Confidence
    chunks: int
    p_call: float
    share: float = 0.0


def mean_scores(p_chunk: Float64, contig: Int64, num_contigs: int) -> Float64:
    """Mean of the scores (C,) of each contig's chunks, float64 (R,), NaN without any; `contig` (C,) is the contig of each chunk."""
    is_scored = ~np.isnan(p_chunk)
    total = np.bincount(contig[is_scored], p_chunk[is_scored], num_contigs)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.bincount(contig[is_scored], minlength=num_contigs))
