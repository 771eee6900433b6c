"""Calls of chunks and contigs from the scores that a head gives them."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import Bool, Float64, Int64
from virnuc_core.models.scores import ContigScores, ScoredRows, TierRule, mean_scores
from virnuc_core.specs import Tier

NO_FRAME: Final = 255
DEFAULT_THRESHOLD: Final = 0.5
VIRUS: Final = "virus"
OTHER: Final = "other"
UNSCORED: Final = "unscored"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCalls:
    """Calls of C chunks, arrays (C,).

    Attributes:
        p_virus: NaN where not scored; what the others hold there means nothing.
        best_frame: number of the most confident frame, `NO_FRAME` where not scored.
        classes: number of the class, -1 where not scored; None of a head without classes.
    """

    is_virus: Bool
    p_virus: Float64
    best_frame: npt.NDArray[np.uint8]
    classes: Int64 | None

    @property
    def is_scored(self) -> Bool:
        """Whether the chunk has a score."""
        return ~np.isnan(self.p_virus)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigCalls:
    """Calls of R contigs, arrays (R,).

    Attributes:
        mean_p: mean p_virus of the scored chunks, NaN without any.
        p_call: what the call is made from, NaN without scored chunks: the score of the head.
        tiers: confidence in each call; None without scored chunks.
        classes: number of the class, -1 without scored chunks; None of a head without classes.
    """

    chunks: Int64
    scored_chunks: Int64
    viral_chunks: Int64
    mean_p: Float64
    p_call: Float64
    is_virus: Bool
    tiers: list[Tier | None]
    classes: Int64 | None


def call_chunks(
    rows: ScoredRows,
    frame_numbers: npt.NDArray[np.uint8],
    scores: ContigScores,
    threshold: float = DEFAULT_THRESHOLD,
) -> ChunkCalls:
    """Calls each chunk virus or other; its class is the best on the side of the call.

    The most confident frame is the one whose P(virus) is farthest from 0.5; the first one wins a tie. `frame_numbers` (N,) are those
    of the rows, 0..5.
    """
    best_frame = np.full(len(rows.contig), NO_FRAME, np.uint8)
    if len(rows.chunk):
        p_rows, first = rows.read("scores", 0, len(rows.chunk))[:, 1], rows.first_rows
        confidence = np.abs(p_rows - np.float32(0.5))
        counts = np.diff(np.append(first, len(p_rows)))
        is_best = confidence == np.repeat(np.maximum.reduceat(confidence, first), counts)
        # Assigned in reverse, so that the first frame wins a tie.
        best_frame[rows.chunk[is_best][::-1]] = frame_numbers[is_best][::-1]
    is_virus = scores.p_chunk >= threshold
    return ChunkCalls(
        is_virus=is_virus,
        p_virus=scores.p_chunk,
        best_frame=best_frame,
        classes=_classes_of_calls(is_virus, scores.chunk_classes),
    )


def call_contigs(
    chunks: ChunkCalls,
    contig: Int64,
    scores: ContigScores,
    tier_rules: tuple[TierRule, ...],
    threshold: float = DEFAULT_THRESHOLD,
) -> ContigCalls:
    """Calls each contig virus or other; `contig` (C,) is the contig of each chunk, from 0.

    The tier is that of the first rule that fits, and novel contigs are unsure. The threshold decides the call, not its tier.
    """
    count = len(scores.p_contig)
    scored = np.bincount(contig[chunks.is_scored], minlength=count)
    viral = np.bincount(contig[chunks.is_virus], minlength=count)
    is_virus = scores.p_contig >= threshold
    p_right = np.where(is_virus, scores.p_contig, 1 - scores.p_contig)
    agreeing = np.where(is_virus, viral, scored - viral)
    tiers = np.full(count, "unsure", np.object_)
    for rule in reversed(tier_rules):
        fits = (scored >= rule.chunks) & (p_right >= rule.p_call) & (agreeing >= rule.share * scored)
        tiers[fits] = rule.tier
    tiers[scores.is_novel] = "unsure"
    tiers[scored == 0] = None
    return ContigCalls(
        chunks=np.bincount(contig, minlength=count),
        scored_chunks=scored,
        viral_chunks=viral,
        mean_p=mean_scores(chunks.p_virus, contig, count),
        p_call=scores.p_contig,
        is_virus=is_virus,
        tiers=tiers.tolist(),
        classes=_classes_of_calls(is_virus, scores.contig_classes),
    )


def _classes_of_calls(is_virus: Bool, classes: Int64 | None) -> Int64 | None:
    return None if classes is None else np.where(is_virus, classes[:, 1], classes[:, 0])
