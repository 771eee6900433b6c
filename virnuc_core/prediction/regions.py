"""Viral regions of contigs, from the p_virus of their chunks: a hidden Markov model with two states.

Along a contig the true class changes rarely, while the score of a single chunk is often wrong and often not there. The
model says so: a hidden state, virus or other, that changes at borders, and chunks that each report it through a score.
What is wanted is the posterior probability of each chunk's state, given all chunks of its contig; a region is a run of
chunks in which virus is the likelier state.

A chunk's score enters as a likelihood ratio. The scores are not calibrated, and chunks of one gene or one repeat are
wrong together, so none of them may decide alone: a chunk is taken to report the wrong state every so often, which
bounds its ratio. A chunk without a score has the ratio 1: only its neighbours speak for it, and where they disagree the
border comes to lie midway between them.

The parameters are given, not fitted to the input, so that a contig's regions depend on nothing but its own scores.
Libraries for hidden Markov models fit emissions; these are given, and what is left is the recursion in `_expected`.
docs/regions.md compares the posterior with the likeliest path (Viterbi) and with change points, and says where the
parameters are from.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.prediction.verdicts import Tier

# Least score of a region of each tier but the last, in decibans.
CONFIDENT_SCORE: Final = 30.0
LIKELY_SCORE: Final = 10.0

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionModel:
    """What is taken for granted about contigs and scores.

    Attributes:
        border_every: mean distance in bp between borders of viral and other stretches, over contigs that have any.
        doubt: how likely a chunk is to report the wrong state, whatever its score.
        neutral_p: the p_virus that speaks for neither state.
    """

    border_every: float = 10_000.0
    doubt: float = 0.1
    neutral_p: float = 0.4


DEFAULT_MODEL: Final = RegionModel()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkScores:
    """The C chunks of some whole contigs, in order of contig and place.

    Attributes:
        contig: int64 (C,), number of the contig, ascending.
        start: int64 (C,), first base in the contig, 0-based.
        end: int64 (C,), one past the last base.
        p_virus: float64 (C,), NaN where the chunk is not scored.
    """

    contig: Int64
    start: Int64
    end: Int64
    p_virus: Float64


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A stretch of a contig that is taken to be viral.

    Attributes:
        contig: number of the contig.
        start: first base, 0-based.
        end: one past the last base.
        chunks: chunks that it consists of, with those that are not scored.
        score: how many times likelier the scores of its chunks are if it is viral than if it is not, as
            10 times the decimal logarithm (decibans).
        mean_p: mean p_virus of its scored chunks.
    """

    contig: int
    start: int
    end: int
    chunks: int
    score: float
    mean_p: float

    @property
    def tier(self) -> Tier:
        """How sure it is, by its score."""
        if self.score >= CONFIDENT_SCORE:
            return "confident"
        return "likely" if self.score >= LIKELY_SCORE else "unsure"


def find_regions(chunks: ChunkScores, model: RegionModel = DEFAULT_MODEL) -> list[Region]:
    """Calls the regions of some contigs, in order of contig and place; those of a contig do not touch or overlap.

    Args:
        chunks: all chunks of these contigs.
        model: its parameters.
    """
    if not len(chunks.contig):
        return []
    ratio = likelihood_ratio(chunks.p_virus, model)
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    is_viral = posterior_odds(ratio, border_probability(chunks.start, is_first, model)) > 1
    return regions_of(chunks, is_viral, 10 * np.log10(ratio))


def regions_of(chunks: ChunkScores, is_viral: npt.NDArray[np.bool_], scores: Float64) -> list[Region]:
    """The runs of viral chunks.

    Args:
        chunks: all chunks of some contigs.
        is_viral: bool (C,), whether a chunk is in a region.
        scores: float64 (C,), what each adds to the score of its region.
    """
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    begins = np.flatnonzero(is_viral & (is_first | ~np.roll(is_viral, 1)))
    ends = np.flatnonzero(is_viral & (np.roll(is_first, -1) | ~np.roll(is_viral, -1))) + 1
    num_scored = _sums(~np.isnan(chunks.p_virus), begins, ends)
    columns = (
        chunks.contig[begins],
        chunks.start[begins],
        chunks.end[ends - 1],
        ends - begins,
        _sums(scores, begins, ends),
        _sums(np.nan_to_num(chunks.p_virus), begins, ends) / num_scored,
    )
    return [
        Region(contig=contig, start=start, end=end, chunks=number, score=score, mean_p=mean_p)
        for contig, start, end, number, score, mean_p in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def likelihood_ratio(p_virus: Float64, model: RegionModel) -> Float64:
    """float64 (C,): P(score | virus) / P(score | other), from doubt / (1 - doubt) to its inverse; 1 for NaN."""
    neutral, doubt = model.neutral_p, model.doubt
    p = np.where(np.isnan(p_virus), neutral, p_virus)
    virus, other = p * (1 - neutral), (1 - p) * neutral
    return np.asarray(((1 - doubt) * virus + doubt * other) / (doubt * virus + (1 - doubt) * other))


def border_probability(start: Int64, is_first: npt.NDArray[np.bool_], model: RegionModel) -> Float64:
    """float64 (C,): how likely a chunk's state is another than that of the chunk before it.

    A state that changes at random places, once in `border_every` bp on average, has changed an odd number of times
    after d bp with probability (1 - exp(-2 d / border_every)) / 2; before the first chunk of a contig anything may
    have been.

    Args:
        start: int64 (C,), where the chunks begin.
        is_first: bool (C,), which of them are the first of their contigs.
        model: its parameters.
    """
    distance = np.where(is_first, np.inf, np.diff(start, prepend=0))
    return np.asarray(-np.expm1(-2 * distance / model.border_every) / 2)


def posterior_odds(ratio: Float64, border: Float64) -> Float64:
    """float64 (C,): odds of virus for each chunk, given all chunks of its contig (forward-backward algorithm).

    Args:
        ratio: float64 (C,), likelihood ratios.
        border: float64 (C,), probability of a border before each chunk; 1/2 before the first of a contig.
    """
    before = _expected(ratio.tolist(), border.tolist())
    after = _expected(ratio[::-1].tolist(), np.roll(border, -1)[::-1].tolist())
    return ratio * before * after[::-1]


def _expected(ratio: list[float], border: list[float]) -> Float64:
    """float64 (C,): odds of virus for each chunk, from the chunks before it alone."""
    odds = np.empty(len(ratio))
    known = 1.0
    for row, (own, other) in enumerate(zip(ratio, border, strict=True)):
        same = 1.0 - other
        expected = (same * known + other) / (other * known + same)
        odds[row] = expected
        known = expected * own
    return odds


def _sums(values: npt.NDArray[Any], begins: Int64, ends: Int64) -> Float64:
    """float64 (n,): sums of values[begins[i] : ends[i]], for ranges that are not empty."""
    bounds = np.stack((begins, ends), axis=1).ravel()
    return np.asarray(np.add.reduceat(np.append(values, 0.0), bounds)[::2])
