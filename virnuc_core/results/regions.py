"""Viral regions of contigs, from the p_virus of their chunks: a hidden Markov model of levels.

Along a contig the log-odds of its chunks keep to a level, which changes where a viral stretch begins or ends, while the
score of a single chunk is often wrong and often not there. The model says so: a hidden level, one of LEVELS, that is
drawn anew at change points, and chunks whose log-odds scatter around it. Levels above zero are viral. What is wanted is
the posterior probability, given all chunks of a contig, that the level of a chunk is viral; a region is a run of chunks
in which it is above one half.

Several levels and not two: viruses differ in how well they score, and the border of one that scores moderately is
where its level ends, not where single chunks fall below one half. No score is taken at its word, since scores are not
calibrated and chunks of one gene or one repeat are wrong together: they scatter widely, log-odds are bounded, and some
chunks say nothing. A chunk without a score is one of those. It goes with its neighbours; where they disagree the border
comes to lie midway between them, and where no neighbour is near there is no region.

The parameters are given, not fitted to the input, so that a contig's regions depend on nothing but its own scores.
Libraries for hidden Markov models fit emissions; these are given, and what is left is the recursion in `_expected`.
docs/regions.md compares the model with others, and says where the parameters are from.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.results.verdicts import DEFAULT_THRESHOLD, Tier

# Log-odds of virus that a stretch may keep to, the lower half of them not viral, and the largest ones that are told apart.
LEVELS: Final = np.array([-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
LARGEST_LOG_ODDS: Final = 4.0
LEAST_LOG_ODDS: Final = 1e-9
# Least score of a region of each tier but the last, in decibans. One chunk gives 16 at most.
CONFIDENT_SCORE: Final = 60.0
LIKELY_SCORE: Final = 20.0

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionModel:
    """What is taken for granted about contigs and scores.

    Attributes:
        change_every: mean distance in bp between change points.
        scatter: standard deviation of a chunk's log-odds around the level, in nats.
        doubt: weight of a chunk that says nothing, beside the height 1 of the normal curve.
        reach: bp; a chunk without a score is in a region only if a scored one begins no farther from it.
    """

    change_every: float = 30_000.0
    scatter: float = 1.2
    doubt: float = 0.01
    reach: float = 2_500.0


DEFAULT_MODEL: Final = RegionModel()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkScores:
    """The C chunks of some whole contigs, in order of contig and place.

    Attributes:
        contig: int64 (C,), number of the contig, ascending.
        start: int64 (C,), first base in the contig, 0-based.
        end: int64 (C,), one past the last base.
        p_virus: float64 (C,), NaN where the chunk is not scored.
        is_dna_alone: bool (C,), whether the score is of the DNA alone.
    """

    contig: Int64
    start: Int64
    end: Int64
    p_virus: Float64
    is_dna_alone: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A stretch of a contig that is taken to be viral.

    Attributes:
        contig: number of the contig.
        start: first base, 0-based.
        end: one past the last base.
        chunks: chunks that it consists of, with those that are not scored.
        dna_alone_chunks: those of them whose score is of the DNA alone.
        score: how many times likelier the scores of its chunks are, each by itself, at viral levels than at the
            others, as 10 times the decimal logarithm (decibans); from 0.5, whatever the threshold.
        mean_p: mean p_virus of its scored chunks.
    """

    contig: int
    start: int
    end: int
    chunks: int
    dna_alone_chunks: int
    score: float
    mean_p: float

    @property
    def tier(self) -> Tier:
        """How sure it is, by its score."""
        if self.score >= CONFIDENT_SCORE:
            return "confident"
        return "likely" if self.score >= LIKELY_SCORE else "unsure"


def find_regions(
    chunks: ChunkScores, model: RegionModel = DEFAULT_MODEL, threshold: float = DEFAULT_THRESHOLD
) -> list[Region]:
    """Calls the regions of some contigs, in order of contig and place; those of a contig do not touch or overlap.

    Args:
        chunks: all chunks of these contigs.
        model: its parameters.
        threshold: p_virus from which chunks are called virus.
    """
    if not len(chunks.contig):
        return []
    likelihood = level_evidence(chunks.p_virus, model, threshold)
    is_viral = (posterior(chunks, likelihood, model) > 0.5) & _is_near_score(chunks, model.reach)
    evidence = level_evidence(chunks.p_virus, model)
    num_other = len(LEVELS) // 2
    ratio = evidence[:, num_other:].sum(axis=1) / evidence[:, :num_other].sum(axis=1)
    return regions_of(chunks, is_viral, 10 * np.log10(ratio))


def regions_of(chunks: ChunkScores, is_viral: npt.NDArray[np.bool_], scores: Float64) -> list[Region]:
    """The runs of viral chunks that have a score among them.

    Args:
        chunks: all chunks of some contigs.
        is_viral: bool (C,), whether a chunk is in a region.
        scores: float64 (C,), what each adds to the score of its region.
    """
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    begins = np.flatnonzero(is_viral & (is_first | ~np.roll(is_viral, 1)))
    ends = np.flatnonzero(is_viral & (np.roll(is_first, -1) | ~np.roll(is_viral, -1))) + 1
    has_score = _sums(~np.isnan(chunks.p_virus), begins, ends) > 0
    begins, ends = begins[has_score], ends[has_score]
    columns = (
        chunks.contig[begins],
        chunks.start[begins],
        chunks.end[ends - 1],
        ends - begins,
        _sums(chunks.is_dna_alone, begins, ends).astype(np.int64),
        _sums(scores, begins, ends),
        _sums(np.nan_to_num(chunks.p_virus), begins, ends) / _sums(~np.isnan(chunks.p_virus), begins, ends),
    )
    return [
        Region(
            contig=contig,
            start=start,
            end=end,
            chunks=number,
            dna_alone_chunks=dna_alone,
            score=score,
            mean_p=mean_p,
        )
        for contig, start, end, number, dna_alone, score, mean_p in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def log_odds(p_virus: Float64, threshold: float = DEFAULT_THRESHOLD) -> Float64:
    """float64 (C,): in nats above those of the threshold, bounded by LARGEST_LOG_ODDS; NaN stays.

    None is zero: a chunk at the threshold is called virus, so it speaks for a virus here too.
    """
    zero = np.log(threshold / (1 - threshold))
    least, rest = (1 / (1 + np.exp(LARGEST_LOG_ODDS + shift)) for shift in (-zero, zero))
    p = np.clip(p_virus, least, 1 - rest)
    distance = np.abs(np.log(p / (1 - p)) - zero)
    return np.asarray(
        np.copysign(np.maximum(distance, LEAST_LOG_ODDS), np.where(p_virus >= threshold, 1.0, -1.0))
    )


def level_evidence(p_virus: Float64, model: RegionModel, threshold: float = DEFAULT_THRESHOLD) -> Float64:
    """float64 (C, number of levels): how likely each score is at each level, but for a common factor; 1 for NaN.

    Log-odds count from those of the threshold.
    """
    distance = (log_odds(p_virus, threshold)[:, None] - LEVELS) / model.scatter
    return np.where(np.isnan(distance), 1.0, np.exp(-(distance**2) / 2) + model.doubt)


def posterior(chunks: ChunkScores, evidence: Float64, model: RegionModel) -> Float64:
    """float64 (C,): probability that each chunk is viral, given all chunks of its contig (forward-backward algorithm).

    Args:
        chunks: all chunks of some contigs.
        evidence: float64 (C, number of levels), see `level_evidence`.
        model: its parameters.
    """
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    distance = np.where(is_first, np.inf, np.diff(chunks.start, prepend=0))
    change = -np.expm1(-distance / model.change_every)
    counts = np.diff(np.flatnonzero(np.append(is_first, True)))
    before = _expected(evidence, change, counts)
    after = _expected(evidence[::-1], np.roll(change, -1)[::-1], counts[::-1])[::-1]
    joint = before * evidence * after
    return np.asarray(joint[:, len(LEVELS) // 2 :].sum(axis=1) / joint.sum(axis=1))


def _expected(evidence: Float64, change: Float64, counts: Int64) -> Float64:
    """float64 (C, number of levels): probability of each level at each chunk, from the chunks before it alone.

    Contigs are independent, so all of them are gone through side by side, the longest first; there is one step for each
    chunk of that.

    Args:
        evidence: float64 (C, number of levels).
        change: float64 (C,), probability of a change point before each chunk; 1 for the first of a contig.
        counts: int64 (R,), chunks of each contig.
    """
    expected = np.empty_like(evidence)
    order = np.argsort(-counts, kind="stable")
    starts = (np.cumsum(counts) - counts)[order]
    num_longer = np.searchsorted(-counts[order], -np.arange(counts.max()))
    known = np.zeros((len(counts), len(LEVELS)))
    for step, number in enumerate(num_longer.tolist()):
        rows = starts[:number] + step
        changed = change[rows, None]
        level = (1 - changed) * known[:number] + changed / len(LEVELS)
        expected[rows] = level
        level *= evidence[rows]
        known[:number] = level / level.sum(axis=1, keepdims=True)
    return expected


def _is_near_score(chunks: ChunkScores, reach: float) -> npt.NDArray[np.bool_]:
    """Whether a scored chunk of the same contig begins at most `reach` bp before or after each chunk; bool (C,)."""
    is_scored = ~np.isnan(chunks.p_virus)
    # Contigs are laid out on one line, too far from each other to be near.
    place = chunks.start + chunks.contig * (chunks.end.max() + 2 * reach)
    before = np.maximum.accumulate(np.where(is_scored, place, -np.inf))
    after = np.minimum.accumulate(np.where(is_scored, place, np.inf)[::-1])[::-1]
    return np.asarray((place - before <= reach) | (after - place <= reach))


def _sums(values: npt.NDArray[Any], begins: Int64, ends: Int64) -> Float64:
    """float64 (n,): sums of values[begins[i] : ends[i]], for ranges that are not empty."""
    bounds = np.stack((begins, ends), axis=1).ravel()
    return np.asarray(np.add.reduceat(np.append(values, 0.0), bounds)[::2])
