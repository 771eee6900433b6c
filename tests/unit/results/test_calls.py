"""Verdicts on contigs, against the rules written out one by one."""

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.models.heads import ContigHead, Head, MLPClassifier
from virnuc_core.models.scores import ContigScores, ScoredRows, mean_scores
from virnuc_core.results.calls import (
    CALLS,
    NO_FRAME,
    Candidates,
    ContigCalls,
    Scored,
    best_frames,
    call_contigs,
    find_candidates,
    sample_scores,
)
from virnuc_core.results.sample import Mixture

PROBABILITY = st.floats(0, 1, width=32)
NAN = float("nan")
LOW, HIGH = [0.05] * 15, [0.9] * 10


def rows_of(frames: list[list[tuple[float, float]]]) -> ScoredRows:
    """Rows of the chunks of one contig, as (P(other), P(virus))."""
    values = np.array([pair for several in frames for pair in several], np.float32).reshape(-1, 2)
    return ScoredRows(
        read=lambda name, begin, end: values[begin:end],
        chunk=np.repeat(np.arange(len(frames)), [len(several) for several in frames]),
        contig=np.zeros(len(frames), np.int64),
        num_contigs=1,
    )


def test_chunks_are_scored_by_the_highest_scores_of_both_classes_and_a_tie_is_viral() -> None:
    frames = [
        [(0.1, 0.9), (0.8, 0.2)],
        [(0.4, 0.6), (0.9, 0.1)],
        [],
        [(0, 1), (0.5, 0.5)],
        [(0.25, 0.75), (0.75, 0.25)],
    ]
    found = MLPClassifier(2).score_contigs(rows_of(frames)).p_chunk
    assert found.tolist() == pytest.approx([0.6, 0.289898, NAN, 1, 0.5], abs=1e-5, nan_ok=True)


@given(PROBABILITY, PROBABILITY)
def test_a_score_is_at_least_half_exactly_where_virnucpro_says_virus(other: float, virus: float) -> None:
    for pair in ((other, virus), (virus, np.nextafter(np.float32(virus), np.float32(1)))):
        [other, virus] = map(np.float32, pair)
        [p_chunk] = MLPClassifier(2).score_contigs(rows_of([[(other, virus)]])).p_chunk
        assert (p_chunk >= 0.5) == (virus >= other)


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), PROBABILITY), max_size=6), max_size=20))
def test_the_best_frame_is_the_first_of_the_most_confident(chunks: list[list[tuple[int, float]]]) -> None:
    rows = rows_of([[(1 - p, p) for _, p in several] for several in chunks])
    numbers = np.array([frame for several in chunks for frame, _ in several], np.uint8)
    expected = [
        max(several, key=lambda one: abs(np.float32(one[1]) - np.float32(0.5)))[0] if several else NO_FRAME
        for several in chunks
    ]
    assert best_frames(rows, numbers, len(chunks)).tolist() == expected


def scored(score: list[float], chunks: int = 9, viral: int = 9, *, is_novel: bool = False) -> Scored:
    """Contigs or regions with so many scored and viral chunks."""
    count = len(score)
    return Scored(
        score=np.array(score),
        chunks=np.full(count, chunks + 1),
        scored_chunks=np.full(count, chunks),
        viral_chunks=np.full(count, viral),
        classes=None,
        novelty=None,
        is_novel=np.full(count, is_novel),
    )


def candidates(contigs: list[int], score: list[float]) -> Candidates:
    start = np.arange(len(contigs))
    return Candidates(contig=np.array(contigs, np.int64), start=start, end=start + 1, scored=scored(score))


def call(
    contigs: Scored,
    parts: Candidates | None = None,
    threshold: float = 0.5,
    mixture: Mixture | None = None,
    head: type[Head] = ContigHead,
) -> tuple[list[str], ContigCalls]:
    parts = parts or candidates([], [])
    calls = call_contigs(contigs, parts, threshold, mixture, head.confidence_rules)
    return [CALLS[number] for number in calls.call.tolist()], calls


def test_scores_are_rounded_and_chunks_counted() -> None:
    found = ContigScores(
        p_chunk=np.array([0.9, NAN, 0.4, 0.5, NAN]),
        p_region=np.zeros(5),
        p_contig=np.array([0.4999996, 0.1, NAN]),
        is_novel=np.zeros(3, np.bool_),
    )
    contigs = Scored.of(found, np.array([0, 0, 0, 1, 2]))
    assert contigs.score.tolist() == pytest.approx([0.5, 0.1, NAN], nan_ok=True)
    assert contigs.chunks.tolist() == [3, 1, 1]
    assert contigs.scored_chunks.tolist() == [2, 1, 0]
    assert contigs.viral_chunks.tolist() == [1, 1, 0]
    assert call(contigs)[0] == ["virus", "nonviral", "unscored"]


@pytest.mark.parametrize("threshold", [0.01, 0.5, 0.9])
def test_calls_begin_at_the_threshold(threshold: float) -> None:
    verdicts, _ = call(scored([0, threshold - 1e-6, threshold, 1, NAN]), threshold=threshold)
    assert verdicts == ["nonviral", "nonviral", "virus", "virus", "unscored"]


def test_a_contig_with_a_provirus_is_called_by_its_best_one() -> None:
    contigs, parts = scored([0.1, 0.95, 0.2, 0.3]), candidates([0, 1, 2, 2], [0.7, 0.93, 0.97, 0.9])
    assert sample_scores(contigs, parts).tolist() == [0.7, 0.95, 0.97, 0.3]
    verdicts, calls = call(contigs, parts, 0.9)
    assert verdicts == ["nonviral", "provirus", "provirus", "nonviral"]
    assert calls.is_provirus.tolist() == [False, True, True, True]
    assert calls.provirus_confidence[1:].tolist() == ["confident", "confident", "confident"]
    assert calls.confidence.tolist() == ["confident", "confident", "confident", "unsure"]


@pytest.mark.parametrize(
    ("head", "chunks", "viral", "score", "confidence"),
    [
        (MLPClassifier, 1, 1, 0.99, "unsure"),
        (MLPClassifier, 4, 4, 0.9, "likely"),
        (MLPClassifier, 5, 5, 0.9, "confident"),
        (MLPClassifier, 5, 0, 0.1, "confident"),
        (MLPClassifier, 5, 4, 0.8, "confident"),
        (MLPClassifier, 5, 3, 0.8, "unsure"),
        (MLPClassifier, 9, 9, 0.6, "unsure"),
        (ContigHead, 2, 0, 0.9, "confident"),
        (ContigHead, 2, 2, 0.1, "confident"),
        (ContigHead, 1, 1, 0.99, "likely"),
        (ContigHead, 1, 1, 0.75, "likely"),
        (ContigHead, 9, 9, 0.7, "unsure"),
        (ContigHead, 0, 0, NAN, None),
    ],
)
def test_confidence(head: type[Head], chunks: int, viral: int, score: float, confidence: str | None) -> None:
    assert call(scored([score], chunks, viral), head=head)[1].confidence.tolist() == [confidence]


def test_confidence_is_on_the_side_of_the_call_at_the_samples_share_and_falls_with_novelty() -> None:
    contigs = scored([0.97, 0.01])
    assert call(contigs, threshold=0.98)[1].confidence.tolist() == ["unsure", "confident"]
    rare = Mixture.of(np.array([0.97, 0.01]), prior=1e-3)
    assert call(contigs, mixture=rare)[1].confidence.tolist() == ["unsure", "confident"]
    assert call(scored([0.99, NAN], is_novel=True))[1].confidence.tolist() == ["unsure", None]


class _MeanHead:
    """Scores a contig by the mean of its chunks' second numbers; regions are found from the first."""

    def score_contigs(self, rows: ScoredRows) -> ContigScores:
        p_region, p_chunk = np.full((2, len(rows.contig)), NAN)
        p_region[rows.chunk], p_chunk[rows.chunk] = rows.read("scores", 0, len(rows.chunk)).T
        return ContigScores(
            p_chunk=p_chunk,
            p_region=p_region,
            p_contig=mean_scores(p_chunk, rows.contig, rows.num_contigs),
            is_novel=np.zeros(rows.num_contigs, np.bool_),
        )


def found_in(
    *contigs: list[float], whole: dict[float, float] | None = None
) -> list[tuple[int, int, int, float]]:
    """Candidates, as contig, first and last chunk and score, of chunks of 500 bp; `whole` replaces scores beside those for regions."""
    counts = [len(contig) for contig in contigs]
    p_region = np.concatenate([np.empty(0), *map(np.array, contigs)])
    p_chunk = np.array([(whole or {}).get(p, p) for p in p_region.tolist()])
    scored_chunks = np.flatnonzero(~np.isnan(p_region))
    values = np.stack((p_region, p_chunk), axis=1)[scored_chunks]
    rows = ScoredRows(
        read=lambda name, begin, end: values[begin:end],
        chunk=scored_chunks,
        contig=np.repeat(np.arange(len(contigs)), counts),
        num_contigs=len(contigs),
    )
    start = 500 * np.concatenate([np.arange(0), *map(np.arange, counts)])
    head = cast(Head, _MeanHead())
    found = find_candidates(head, rows, head.score_contigs(rows), start, start + 500)
    places = (found.contig, found.start // 500, found.end // 500 - 1, found.scored.score)
    return list(zip(*(column.tolist() for column in places), strict=True))


@pytest.mark.parametrize(
    ("contig", "expected"),
    [
        ([*LOW, *HIGH, *LOW], [(15, 24)]),
        ([*HIGH, *LOW, *HIGH], [(0, 9), (25, 34)]),
        ([*LOW, NAN, 0.9, NAN, *HIGH, NAN, *LOW], [(15, 27)]),
        ([*LOW, *[0.9] * 3, *LOW], []),  # weak
        ([*HIGH, 0.05, 0.05], []),  # viral as a whole
        ([*HIGH], []),
        ([*HIGH, *[NAN] * 9], []),  # nothing is known of the rest
        ([NAN] * 9, []),
        ([], []),
    ],
)
def test_candidates_are_viral_regions_of_other_contigs(
    contig: list[float], expected: list[tuple[int, int]]
) -> None:
    for before, after in ([], []), ([LOW, [0.9]], [HIGH]):
        found = found_in(*before, contig, *after)
        assert [(number, *place) for number, *place, _ in found] == [(len(before), *one) for one in expected]
        assert [score for *_, score in found] == pytest.approx([0.9] * len(expected))


def test_a_region_is_no_candidate_if_its_remainder_is_viral_too_or_it_is_not_viral_itself() -> None:
    contig = [*LOW, *HIGH, *LOW]
    assert len(found_in(contig, whole={0.05: 0.49})) == 1
    assert found_in(contig, whole={0.05: 0.5}) == []
    assert found_in(contig, whole={0.9: 0.49}) == []
    assert len(found_in(contig, whole={0.9: 0.5})) == 1
