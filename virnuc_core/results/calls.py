"""Calls of chunks and contigs.

Of open reading frames, a chunk is called from the scores of its frames and a contig from its chunks. Of the longest stop-free
stretches, both are called from the scores that the head gives them, see `virnuc_core.results.contig_scores`.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

NO_FRAME: Final = 255
DEFAULT_THRESHOLD: Final = 0.5
VIRUS: Final = "virus"
OTHER: Final = "other"
UNSCORED: Final = "unscored"
Tier = Literal["confident", "likely", "unsure"]

# Minimum number of scored chunks, minimum distance of mean_p from 0.5 on the side of the call, and
# minimum share of the scored chunks whose call agrees with the contig's.
_TIER_RULES: Final[tuple[tuple[Tier, int, float, float], ...]] = (
    ("confident", 5, 0.3, 0.8),
    ("likely", 2, 0.15, 0.65),
)
# Of contigs that the head scores: minimum number of scored chunks, and minimum probability of the call.
_CONTIG_TIER_RULES: Final[tuple[tuple[Tier, int, float], ...]] = (("confident", 2, 0.95), ("likely", 1, 0.9))

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCalls:
    """Calls of C chunks, arrays (C,).

    Attributes:
        is_scored: where False, the other arrays are not meaningful.
        p_virus: NaN where not scored.
        best_frame: number of the most confident frame, `NO_FRAME` where not scored.
        p_region: what regions are found from, NaN where not scored.
        classes: number of the class, -1 where not scored; None for open reading frames.
    """

    is_scored: Bool
    is_virus: Bool
    p_virus: Float64
    best_frame: npt.NDArray[np.uint8]
    p_region: Float64
    classes: Int64 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigCalls:
    """Calls of R contigs, arrays (R,).

    Attributes:
        mean_p: mean p_virus of the scored chunks, NaN without any.
        p_call: what the call is made from, NaN without scored chunks: `mean_p`, or the score of the head.
        tiers: confidence in each call; None without scored chunks.
        classes: number of the class, -1 without scored chunks; None for open reading frames.
        novelty: see `ContigScores`; None for open reading frames.
    """

    chunks: Int64
    scored_chunks: Int64
    viral_chunks: Int64
    mean_p: Float64
    p_call: Float64
    is_virus: Bool
    tiers: list[Tier | None]
    classes: Int64 | None = None
    novelty: Float64 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigScores:
    """Scores that a head gives to C chunks and R contigs: calibrated probabilities, NaN without a row.

    Attributes:
        p_chunk: (C,) of the chunk alone.
        p_context: (C,) of the chunk in its contig.
        p_contig: (R,).
        chunk_classes: (C, 2) numbers of the most probable class that is no virus, and of the most probable virus; -1 without a row.
        contig_classes: (R, 2), likewise.
        embedding: fp32 (R, 64) of length 1, NaN without a row.
        novelty: (R,) distance to the nearest centroid of the head, 1 - cosine, 0..2; NaN without a row or centroids.
        is_novel: (R,) whether that is above the head's limit.
    """

    p_chunk: Float64
    p_context: Float64
    p_contig: Float64
    chunk_classes: Int64
    contig_classes: Int64
    embedding: npt.NDArray[np.float32]
    novelty: Float64
    is_novel: Bool


def call_chunks(
    scores: npt.NDArray[np.float32],
    chunks: Int64,
    frame_numbers: npt.NDArray[np.uint8],
    num_chunks: int,
    threshold: float = DEFAULT_THRESHOLD,
) -> ChunkCalls:
    """Calls each chunk virus or other from the scores of its frames, sorted by chunk.

    Let M1 and M2 be the highest P(other) and P(virus) over the frames of a chunk. Its p_virus lies midway, in log-odds, between
    the frame with the strongest evidence for a virus and the one with the strongest evidence against: for a single frame it is
    the frame's score, and it is at least 0.5 exactly when M2 >= M1. The most confident frame is the one whose P(virus) is
    farthest from 0.5; the first one wins a tie.

    `scores` is (n, 2), P(other) and P(virus) of n frames; `chunks` (n,) and `frame_numbers` (n,) are their chunk, from 0, and
    frame, 0..5.

    Source: `determine_virus` in VirNucPro's prediction.py, for the call at 0.5.
    """
    is_scored = np.zeros(num_chunks, np.bool_)
    p_virus = np.full(num_chunks, np.nan)
    best_frame = np.full(num_chunks, NO_FRAME, np.uint8)
    if len(scores):
        starts = np.concatenate(([0], np.flatnonzero(np.diff(chunks)) + 1))
        scored = chunks[starts]
        is_scored[scored] = True
        p_virus[scored] = _midway(*np.maximum.reduceat(scores, starts).astype(np.float64).T)
        confidence = np.abs(scores[:, 1] - np.float32(0.5))
        frames_each = np.diff(np.append(starts, len(scores)))
        is_best = confidence == np.repeat(np.maximum.reduceat(confidence, starts), frames_each)
        # Assigned in reverse, so that the first frame wins a tie.
        best_frame[chunks[is_best][::-1]] = frame_numbers[is_best][::-1]
    return ChunkCalls(
        is_scored=is_scored,
        is_virus=p_virus >= threshold,
        p_virus=p_virus,
        best_frame=best_frame,
        p_region=p_virus,
    )


def _midway(highest_other: Float64, highest_virus: Float64) -> Float64:
    """P(virus) at the mean of the log-odds of `highest_virus` and of 1 - `highest_other`, all (C,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds_against = ((1 - highest_virus) * highest_other) / (highest_virus * (1 - highest_other))
    # Opposite scores of exactly 0 and 1 give 0 / 0.
    odds_against[highest_virus == highest_other] = 1.0
    return np.asarray(1 / (1 + np.sqrt(odds_against)))


def call_contigs(
    calls: ChunkCalls, contigs: Int64, num_contigs: int, threshold: float = DEFAULT_THRESHOLD
) -> ContigCalls:
    """Calls each contig from the mean p_virus of its scored chunks; `contigs` (C,) is the contig of each chunk, from 0.

    The tier depends on the number of scored chunks and their agreement. The threshold decides the call, not its tier.
    """
    scored = np.bincount(contigs[calls.is_scored], minlength=num_contigs)
    viral = np.bincount(contigs[calls.is_virus], minlength=num_contigs)
    p_sum = np.bincount(contigs[calls.is_scored], calls.p_virus[calls.is_scored], num_contigs)
    with np.errstate(invalid="ignore"):
        mean_p = p_sum / scored
    is_virus = mean_p >= threshold
    margin = np.where(is_virus, mean_p - 0.5, 0.5 - mean_p)
    agreeing = np.where(is_virus, viral, scored - viral)
    tiers = np.full(num_contigs, "unsure", np.object_)
    tiers[scored == 0] = None
    for tier, least_chunks, least_margin, least_share in reversed(_TIER_RULES):
        tiers[(scored >= least_chunks) & (margin >= least_margin) & (agreeing >= least_share * scored)] = tier
    return ContigCalls(
        chunks=np.bincount(contigs, minlength=num_contigs),
        scored_chunks=scored,
        viral_chunks=viral,
        mean_p=mean_p,
        p_call=mean_p,
        is_virus=is_virus,
        tiers=tiers.tolist(),
    )


def call_scored_chunks(
    calls: ChunkCalls, scores: ContigScores, threshold: float = DEFAULT_THRESHOLD
) -> ChunkCalls:
    """Calls chunks from the scores of the head instead of those of their rows; the class is the best on the side of the call."""
    is_virus = scores.p_chunk >= threshold
    return replace(
        calls,
        is_virus=is_virus,
        p_virus=scores.p_chunk,
        p_region=scores.p_context,
        classes=_classes_of_calls(is_virus, scores.chunk_classes),
    )


def call_scored_contigs(
    chunks: ChunkCalls, contigs: Int64, scores: ContigScores, threshold: float = DEFAULT_THRESHOLD
) -> ContigCalls:
    """Calls contigs from the scores of the head; `chunks` are their calls, and `contigs` (C,) their contigs, from 0.

    The tier depends on the number of scored chunks and on the probability of the call; novel contigs are unsure.
    """
    calls = call_contigs(chunks, contigs, len(scores.p_contig), threshold)
    is_virus = scores.p_contig >= threshold
    p_right = np.where(is_virus, scores.p_contig, 1 - scores.p_contig)
    tiers = np.full(len(p_right), "unsure", np.object_)
    tiers[calls.scored_chunks == 0] = None
    for tier, least_chunks, least_p in reversed(_CONTIG_TIER_RULES):
        tiers[(calls.scored_chunks >= least_chunks) & (p_right >= least_p)] = tier
    tiers[scores.is_novel] = "unsure"
    return replace(
        calls,
        p_call=scores.p_contig,
        is_virus=is_virus,
        tiers=tiers.tolist(),
        classes=_classes_of_calls(is_virus, scores.contig_classes),
        novelty=scores.novelty,
    )


def _classes_of_calls(is_virus: Bool, classes: Int64) -> Int64:
    return np.where(is_virus, classes[:, 1], classes[:, 0])
