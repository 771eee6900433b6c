"""From the scores of frames to a call for each chunk, and from those to one for each contig."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from virnuc_core.sequences.frames import DNA_ALONE

NO_FRAME: Final = 255
# From this p_virus on, or another that is asked for, chunks and contigs are called virus.
DEFAULT_THRESHOLD: Final = 0.5
VIRUS: Final = "virus"
OTHER: Final = "other"
UNSCORED: Final = "unscored"
Tier = Literal["confident", "likely", "unsure"]

# What a contig must have at least for a tier: scored chunks with an open frame, distance of mean_p from 0.5 on the side of the call, share of
# scored chunks that are called as the contig is.
_TIER_RULES: Final[tuple[tuple[Tier, int, float, float], ...]] = (
    ("confident", 5, 0.3, 0.8),
    ("likely", 2, 0.15, 0.65),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkVerdicts:
    """What is called of C chunks.

    Attributes:
        is_scored: bool (C,), whether the chunk has a row; the rest means something only then.
        is_virus: bool (C,).
        p_virus: float64 (C,), at least the threshold exactly where `is_virus`; NaN where not scored.
        best_frame: uint8 (C,), number of the most decided frame, `DNA_ALONE` where there is no open one, and
            `NO_FRAME` where not scored.
    """

    is_scored: npt.NDArray[np.bool_]
    is_virus: npt.NDArray[np.bool_]
    p_virus: npt.NDArray[np.float64]
    best_frame: npt.NDArray[np.uint8]

    @property
    def is_dna_alone(self) -> npt.NDArray[np.bool_]:
        """Bool (C,), whether the score is of the DNA alone."""
        return np.equal(self.best_frame, DNA_ALONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigTotals:
    """Sums over the chunks of R contigs.

    Attributes:
        chunks: int64 (R,), chunks of the contig.
        scored_chunks: int64 (R,), those with a score.
        dna_alone_chunks: int64 (R,), those of them without an open frame.
        viral_chunks: int64 (R,), those called virus.
        p_sum: float64 (R,), p_virus added up over the scored chunks.
    """

    chunks: npt.NDArray[np.int64]
    scored_chunks: npt.NDArray[np.int64]
    dna_alone_chunks: npt.NDArray[np.int64]
    viral_chunks: npt.NDArray[np.int64]
    p_sum: npt.NDArray[np.float64]


def call_chunks(
    scores: npt.NDArray[np.float32],
    chunks: npt.NDArray[np.int64],
    frame_numbers: npt.NDArray[np.uint8],
    num_chunks: int,
    threshold: float = DEFAULT_THRESHOLD,
) -> ChunkVerdicts:
    """Calls each chunk from the scores of its frames.

    With M1 and M2 the highest P(other) and P(virus) over the frames of a chunk, its p_virus lies midway, in
    log-odds, between the frame that speaks most for a virus and the one that speaks most against: for a
    single frame it is the frame's score, and it is at least 0.5 exactly when M2 >= M1. It is called virus
    when its p_virus is at least the threshold. The most decided frame is the one whose P(virus) is farthest
    from 0.5, the first of equals.

    Args:
        scores: fp32 (n, 2), P(other) and P(virus) of n frames.
        chunks: int64 (n,), chunk of each frame, 0..num_chunks-1, ascending.
        frame_numbers: uint8 (n,), 0..5, or `DNA_ALONE` for a chunk without an open frame.
        num_chunks: C.
        threshold: p_virus from which a chunk is called virus.

    Source: `determine_virus` in VirNucPro's prediction.py, for the call from 0.5 on.
    """
    is_scored = np.zeros(num_chunks, np.bool_)
    p_virus = np.full(num_chunks, np.nan)
    best_frame = np.full(num_chunks, NO_FRAME, np.uint8)
    if len(scores):
        starts = np.concatenate(([0], np.flatnonzero(np.diff(chunks)) + 1))
        scored = chunks[starts]
        highest = np.maximum.reduceat(scores, starts)
        is_scored[scored] = True
        p_virus[scored] = _midway(*highest.astype(np.float64).T)
        decided = np.abs(scores[:, 1] - np.float32(0.5))
        frames_each = np.diff(np.append(starts, len(scores)))
        is_best = decided == np.repeat(np.maximum.reduceat(decided, starts), frames_each)
        # Assigned from the last to the first, so that the first of equals stays.
        best_frame[chunks[is_best][::-1]] = frame_numbers[is_best][::-1]
    return ChunkVerdicts(
        is_scored=is_scored, is_virus=p_virus >= threshold, p_virus=p_virus, best_frame=best_frame
    )


def _midway(
    highest_other: npt.NDArray[np.float64], highest_virus: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """P(virus) at the mean of the log-odds of `highest_virus` and of 1 - `highest_other`, all (C,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds_against = ((1 - highest_virus) * highest_other) / (highest_virus * (1 - highest_other))
    # Two frames that are certain of opposite things give 0 / 0.
    odds_against[highest_virus == highest_other] = 1.0
    return np.asarray(1 / (1 + np.sqrt(odds_against)))


def sum_contigs(verdicts: ChunkVerdicts, contigs: npt.NDArray[np.int64], num_contigs: int) -> ContigTotals:
    """Adds up chunks by contig.

    Args:
        verdicts: of C chunks.
        contigs: int64 (C,), contig of each chunk, 0..num_contigs-1.
        num_contigs: R.
    """
    scored = contigs[verdicts.is_scored]
    return ContigTotals(
        chunks=np.bincount(contigs, minlength=num_contigs),
        scored_chunks=np.bincount(scored, minlength=num_contigs),
        dna_alone_chunks=np.bincount(contigs[verdicts.is_dna_alone], minlength=num_contigs),
        viral_chunks=np.bincount(contigs[verdicts.is_virus], minlength=num_contigs),
        p_sum=np.bincount(scored, verdicts.p_virus[verdicts.is_scored], num_contigs).astype(np.float64),
    )


def call_contig(scored_chunks: int, p_sum: float, threshold: float = DEFAULT_THRESHOLD) -> str:
    """`VIRUS` when the mean p_virus over the scored chunks is at least the threshold, `UNSCORED` without any."""
    if scored_chunks == 0:
        return UNSCORED
    return VIRUS if p_sum / scored_chunks >= threshold else OTHER


def tier_contig(
    scored_chunks: int,
    viral_chunks: int,
    p_sum: float,
    dna_alone_chunks: int = 0,
    threshold: float = DEFAULT_THRESHOLD,
) -> Tier | None:
    """How sure the call of a contig is, from the number of its scored chunks and their agreement; None without any.

    Chunks that are scored by their DNA alone agree or not, but do not count as evidence. The distance of mean_p from 0.5
    counts on the side of the call: a threshold decides what is called virus, not how sure that is.
    """
    if scored_chunks == 0:
        return None
    mean_p = p_sum / scored_chunks
    is_virus = call_contig(scored_chunks, p_sum, threshold) == VIRUS
    distance = mean_p - 0.5 if is_virus else 0.5 - mean_p
    agreeing = viral_chunks if is_virus else scored_chunks - viral_chunks
    for tier, chunks, margin, share in _TIER_RULES:
        has_evidence = scored_chunks - dna_alone_chunks >= chunks
        if has_evidence and distance >= margin and agreeing >= share * scored_chunks:
            return tier
    return "unsure"
