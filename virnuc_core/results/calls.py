"""The verdict on each contig: virus, provirus or nonviral. It is made here and nowhere else.

A head scores contigs, and the regions that may be proviruses as if they were contigs. A score is called viral from a threshold on,
which `virnuc_core.results.sample` finds from the scores of the whole sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import Bool, Float64, Int64
from virnuc_core.models.scores import ConfidenceRule, ContigScores, ScoredRows
from virnuc_core.results.regions import find_regions
from virnuc_core.results.sample import Mixture
from virnuc_core.specs import Confidence

if TYPE_CHECKING:
    from virnuc_core.models.heads import Head

VIRUS: Final = "virus"
PROVIRUS: Final = "provirus"
NONVIRAL: Final = "nonviral"
UNSCORED: Final = "unscored"
CALLS: Final = (VIRUS, PROVIRUS, NONVIRAL, UNSCORED)
BALANCED: Final = 0.5  # the score of as many viruses as others
NO_FRAME: Final = 255
# A contig with viral regions over this share of it or more is viral as a whole, or not at all.
WHOLE_SHARE: Final = 0.8
# Log10 likelihood ratio, times 10, of a region that is taken for a provirus; a chunk adds at most 16.
_MIN_DECIBANS: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Scores of n contigs or regions, arrays (n,).

    Attributes:
        score: probability of a virus where half of all sequences are viruses; NaN without a scored chunk.
        chunks: number of chunks.
        scored_chunks: those with a score.
        viral_chunks: those with a score of 0.5 or more.
        classes: int64 (n, 2), as `ContigScores.contig_classes`.
        novelty: as `ContigScores.novelty`.
        is_novel: unlike everything that the head was trained on.
    """

    score: Float64
    chunks: Int64
    scored_chunks: Int64
    viral_chunks: Int64
    classes: Int64 | None
    novelty: Float64 | None
    is_novel: Bool

    @classmethod
    def of(cls, found: ContigScores, contig: Int64) -> "Scored":
        """From the scores of a head; `contig` (C,) is the contig of each chunk, ascending from 0."""
        count = len(found.p_contig)
        return cls(
            score=found.p_contig.round(6),  # as in the tables
            chunks=np.bincount(contig, minlength=count),
            scored_chunks=np.bincount(contig[~np.isnan(found.p_chunk)], minlength=count),
            viral_chunks=np.bincount(contig[found.p_chunk >= BALANCED], minlength=count),
            classes=found.contig_classes,
            novelty=found.novelty,
            is_novel=found.is_novel,
        )

    def __getitem__(self, chosen: Any) -> "Scored":
        """Those that NumPy would choose."""
        return Scored(
            score=self.score[chosen],
            chunks=self.chunks[chosen],
            scored_chunks=self.scored_chunks[chosen],
            viral_chunks=self.viral_chunks[chosen],
            classes=None if self.classes is None else self.classes[chosen],
            novelty=None if self.novelty is None else self.novelty[chosen],
            is_novel=self.is_novel[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Regions that are proviruses if their score is high enough, arrays (n,), by contig and position.

    Attributes:
        contig: number of the contig.
        start: 0-based.
        end: exclusive.
        scored: the regions, scored as contigs.
    """

    contig: Int64
    start: Int64
    end: Int64
    scored: Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigCalls:
    """Calls of R contigs, arrays (R,), and of n candidates, arrays (n,).

    Attributes:
        call: index into `CALLS`.
        confidence: in the call; None without a score. That of a provirus is of its best region.
        is_provirus: (n,) which candidates are proviruses.
        provirus_confidence: (n,).
    """

    call: Int64
    confidence: npt.NDArray[np.object_]
    is_provirus: Bool
    provirus_confidence: npt.NDArray[np.object_]


def best_frames(
    rows: ScoredRows, frame_numbers: npt.NDArray[np.uint8], num_chunks: int
) -> npt.NDArray[np.uint8]:
    """Number of the most confident frame of each chunk, uint8 (C,), `NO_FRAME` without a row.

    It is the one whose P(virus) is farthest from 0.5, the first one of equals; `frame_numbers` (N,) are those of the rows, 0..5.
    """
    best = np.full(num_chunks, NO_FRAME, np.uint8)
    if len(rows.chunk):
        p_rows, first = rows.read("scores", 0, len(rows.chunk))[:, 1], rows.first_rows
        certainty = np.abs(p_rows - np.float32(0.5))
        counts = np.diff(np.append(first, len(p_rows)))
        is_best = certainty == np.repeat(np.maximum.reduceat(certainty, first), counts)
        # Assigned in reverse, so that the first frame wins a tie.
        best[rows.chunk[is_best][::-1]] = frame_numbers[is_best][::-1]
    return best


def find_candidates(
    head: "Head", rows: ScoredRows, found: ContigScores, start: Int64, end: Int64
) -> Candidates:
    """Regions that read as viral, in contigs whose remainder does not; `start` and `end` (C,) are those of the chunks.

    Region and remainder are both scored as contigs of their own: the region's score is at least 0.5, and the remainder's is below.
    """
    regions = find_regions(rows.contig, start, end, found.p_region)
    contig = rows.contig[regions.first]
    lengths = np.zeros(rows.num_contigs, np.int64)
    lengths[rows.contig] = end  # the last chunk's stays
    covered = np.bincount(contig, end[regions.last] - start[regions.first], rows.num_contigs)
    is_likely = (regions.decibans >= _MIN_DECIBANS) & (covered < WHOLE_SHARE * lengths)[contig]
    first, last, contig = regions.first[is_likely], regions.last[is_likely], contig[is_likely]
    hosts, host = np.unique(contig, return_inverse=True)
    part = np.full(len(rows.contig), -1)
    is_host = np.isin(rows.contig, hosts)
    part[is_host] = len(first) + np.searchsorted(hosts, rows.contig[is_host])
    for number, (begin, stop) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        part[begin : stop + 1] = number
    parts = _parts(rows, part, len(first) + len(hosts))
    scored = Scored.of(head.score_contigs(parts), parts.contig)
    with np.errstate(invalid="ignore"):
        is_viral, is_remainder_viral = np.split(scored.score >= BALANCED, [len(first)])
    has_remainder_score = ~np.isnan(scored.score[len(first) :])
    chosen = np.flatnonzero(is_viral & (has_remainder_score & ~is_remainder_viral)[host])
    return Candidates(
        contig=contig[chosen], start=start[first[chosen]], end=end[last[chosen]], scored=scored[chosen]
    )


def sample_scores(contigs: Scored, candidates: Candidates) -> Float64:
    """The scores (R,) that contigs stand for in their sample: their own, or that of their best candidate if it is higher."""
    scores = contigs.score.copy()
    np.maximum.at(scores, candidates.contig, candidates.scored.score)
    return scores


def _parts(rows: ScoredRows, part: Int64, count: int) -> ScoredRows:
    """The rows of the chunks of some parts of contigs, as those of contigs; `part` (C,) is -1 for chunks of none."""
    order = np.argsort(part, kind="stable")[np.count_nonzero(part < 0) :]
    place = np.full(len(part), -1)
    place[order] = np.arange(len(order))
    row_order = np.argsort(place[rows.chunk], kind="stable")[np.count_nonzero(place[rows.chunk] < 0) :]

    def read(name: str, begin: int, end: int) -> npt.NDArray[Any]:
        return rows.read(name, 0, len(rows.chunk))[row_order[begin:end]]

    return ScoredRows(read=read, chunk=place[rows.chunk[row_order]], contig=part[order], num_contigs=count)


def call_contigs(
    contigs: Scored,
    candidates: Candidates,
    threshold: float,
    mixture: Mixture | None,
    confidence_rules: Sequence[ConfidenceRule],
) -> ContigCalls:
    """Calls each contig from the threshold on; a contig with a provirus is no virus, whatever its own score.

    The confidence is that of the first rule that fits, with probabilities for the sample's share of viruses where there is a mixture;
    that of a novel contig is unsure.
    """
    is_provirus = candidates.scored.score >= threshold
    is_virus = contigs.score >= threshold
    call = np.where(is_virus, CALLS.index(VIRUS), CALLS.index(NONVIRAL))
    call[np.isnan(contigs.score)] = CALLS.index(UNSCORED)
    call[candidates.contig[is_provirus]] = CALLS.index(PROVIRUS)
    confidence = _confidence(contigs, is_virus, mixture, confidence_rules)
    of_proviruses = _confidence(candidates.scored, is_provirus, mixture, confidence_rules)
    # In ascending order of the score, so that the best region's stays.
    for number in np.argsort(candidates.scored.score, kind="stable").tolist():
        if is_provirus[number]:
            confidence[candidates.contig[number]] = of_proviruses[number]
    return ContigCalls(
        call=call, confidence=confidence, is_provirus=is_provirus, provirus_confidence=of_proviruses
    )


def _confidence(
    scored: Scored, is_viral: Bool, mixture: Mixture | None, confidence_rules: Sequence[ConfidenceRule]
) -> npt.NDArray[np.object_]:
    p_virus = scored.score if mixture is None else mixture.p_virus(scored.score)
    p_right = np.where(is_viral, p_virus, 1 - p_virus)
    agreeing = np.where(is_viral, scored.viral_chunks, scored.scored_chunks - scored.viral_chunks)
    lowest: Confidence = "unsure"
    confidence = np.full(len(scored.score), lowest, np.object_)
    for rule in reversed(confidence_rules):
        has_chunks = scored.scored_chunks >= rule.chunks
        fits = has_chunks & (p_right >= rule.p_call) & (agreeing >= rule.share * scored.scored_chunks)
        confidence[fits] = rule.confidence
    confidence[scored.is_novel] = lowest
    confidence[np.isnan(scored.score)] = None
    return confidence
