"""Calls of chunks and contigs, against the rules written out one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.models.heads import ContigHead, MLPClassifier
from virnuc_core.models.scores import ContigScores, ScoredRows
from virnuc_core.results.calls import NO_FRAME, ChunkCalls, ContigCalls, call_chunks, call_contigs

PROBABILITY = st.floats(0, 1, width=32)
Frames = list[list[tuple[int, float]]]


def call(
    frames: Frames,
    contigs: list[int] | None = None,
    threshold: float = 0.5,
    *,
    scores: ContigScores | None = None,
    other: float | None = None,
) -> tuple[ChunkCalls, ContigCalls]:
    """Calls chunks given as lists of (frame number, P(virus)), by an MLPClassifier, or by the scores of a ContigHead.

    `contigs` are those of the chunks, by default all of one; `other` replaces the P(other) of all frames.
    """
    listed = [(chunk, frame, p) for chunk, several in enumerate(frames) for frame, p in several]
    values = np.array([(1 - p if other is None else other, p) for _, _, p in listed], np.float32)
    rows = ScoredRows(
        read=lambda name, begin, end: values.reshape(-1, 2)[begin:end],
        chunk=np.array([row[0] for row in listed], np.int64),
        contig=np.array(contigs or [0] * len(frames), np.int64),
        num_contigs=max(contigs or [0]) + 1,
    )
    rules = MLPClassifier.tier_rules if scores is None else ContigHead.tier_rules
    scores = scores or MLPClassifier(2).score_contigs(rows)
    chunks = call_chunks(rows, np.array([row[1] for row in listed], np.uint8), scores, threshold)
    return chunks, call_contigs(chunks, rows.contig, scores, rules, threshold)


def test_p_virus_is_that_of_the_highest_scores_of_both_classes() -> None:
    calls, _ = call(
        [[(0, 0.9), (3, 0.2)], [(1, 0.6), (2, 0.1)], [], [(0, 1.0), (1, 0.5)], [(0, 0.0), (1, 0.5)]]
    )
    assert calls.p_virus.tolist() == pytest.approx([0.6, 0.289898, np.nan, 1, 0], abs=1e-5, nan_ok=True)
    assert calls.best_frame.tolist() == [0, 2, NO_FRAME, 0, 0]


def test_a_tie_is_virus() -> None:
    calls, _ = call([[(0, 0.75), (1, 0.25)], [(2, 0.5)], [(0, 1.0), (1, 0.0)]])
    assert calls.is_virus.tolist() == [True, True, True]
    assert calls.p_virus.tolist() == [0.5, 0.5, 0.5]


@given(PROBABILITY, PROBABILITY)
def test_p_virus_is_at_least_half_exactly_where_virnucpro_says_virus(other: float, virus: float) -> None:
    for pair in ((other, virus), (virus, np.nextafter(np.float32(virus), np.float32(1)))):
        [other, virus] = map(np.float32, pair)
        calls, _ = call([[(0, float(virus))]], other=float(other))
        assert (calls.p_virus[0] >= 0.5) == calls.is_virus[0] == (virus >= other)


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), PROBABILITY), max_size=6), max_size=20))
def test_any_chunks(frames: Frames) -> None:
    calls, _ = call(frames or [[]])
    assert calls.is_scored.tolist() == [bool(several) for several in frames or [[]]]
    for chunk, several in enumerate(frames):
        if several:
            pairs = [(np.float32(1 - p), np.float32(p), frame) for frame, p in several]
            is_virus = max(pair[1] for pair in pairs) >= max(pair[0] for pair in pairs)
            assert calls.is_virus[chunk] == is_virus
            # max() takes the first one of a tie.
            assert calls.best_frame[chunk] == max(pairs, key=lambda pair: abs(pair[1] - np.float32(0.5)))[2]


def test_contigs_are_sums_over_their_chunks() -> None:
    _, calls = call([[(0, 0.9)], [], [(2, 0.4)], [(1, 0.1)], []], [0, 0, 0, 1, 2])
    assert calls.chunks.tolist() == [3, 1, 1]
    assert calls.scored_chunks.tolist() == [2, 1, 0]
    assert calls.viral_chunks.tolist() == [1, 0, 0]
    assert calls.mean_p.tolist() == pytest.approx([0.65, 0.1, np.nan], nan_ok=True)
    assert calls.is_virus.tolist() == [True, False, False]
    assert calls.tiers == ["unsure", "unsure", None]


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.5, 0.9])
def test_a_threshold_is_where_calls_begin(threshold: float) -> None:
    below = float(np.nextafter(np.float32(threshold), np.float32(0)))
    frames: Frames = [*([(0, p)] for p in (0.0, below, threshold + 1e-6, 1.0)), []]
    for calls in call(frames, [0, 1, 2, 3, 4], threshold):
        assert calls.is_virus.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("p_virus", "threshold", "tier"),
    [
        # many chunks that agree
        ([0.99], 0.5, "unsure"),
        ([0.9] * 4, 0.5, "likely"),
        ([0.9] * 5, 0.5, "confident"),
        ([0.1] * 5, 0.5, "confident"),
        ([0.98] * 4 + [0.2], 0.5, "confident"),
        ([0.97] * 3 + [0.6, 0.4], 0.5, "likely"),
        ([0.66] * 9, 0.5, "likely"),
        ([0.6] * 9, 0.5, "unsure"),
        ([0.99, 0.99, 0.99, 0.4, 0.4, 0.45], 0.5, "unsure"),
        ([0.05] * 5 + [0.9] * 5, 0.5, "unsure"),
        # a threshold changes no confidence
        ([0.95] * 9, 0.9, "confident"),
        ([0.8] * 9, 0.9, "unsure"),
        ([0.2] * 9, 0.1, "unsure"),
        ([0.05] * 9, 0.1, "confident"),
    ],
)
def test_tiers(p_virus: list[float], threshold: float, tier: str) -> None:
    frames: Frames = [[(0, p)] for p in p_virus]
    assert call(frames, None, threshold)[1].tiers == [tier]


def scores_of(p_chunk: list[float], p_contig: float, *, is_novel: bool = False) -> ContigScores:
    """Scores of one contig; class 2 is the best that is no virus, class 1 the best virus."""
    p = np.array(p_chunk)
    classes = np.where(np.isnan(p)[:, None], -1, [[2, 1]])
    return ContigScores(
        p_chunk=p,
        p_region=p / 2,
        p_contig=np.array([p_contig]),
        chunk_classes=classes,
        contig_classes=np.array([[2, 1]]) if len(p) else np.array([[-1, -1]]),
        embedding=np.zeros((1, 64), np.float32),
        novelty=np.array([0.5]),
        is_novel=np.array([is_novel]),
    )


@pytest.mark.parametrize(
    ("scored_chunks", "p_contig", "threshold", "tier"),
    [
        (2, 0.95, 0.5, "confident"),
        (2, 0.05, 0.5, "confident"),
        (1, 0.99, 0.5, "likely"),
        (1, 0.9, 0.5, "likely"),
        (9, 0.89, 0.5, "unsure"),
        # on the side of the call
        (9, 0.79, 0.9, "unsure"),
        (9, 0.01, 0.001, "unsure"),
        (0, np.nan, 0.5, None),
    ],
)
def test_tiers_of_contigs_that_the_head_scores(
    scored_chunks: int, p_contig: float, threshold: float, tier: str | None
) -> None:
    scores = scores_of([0.4] * scored_chunks + [np.nan], p_contig)
    frames: Frames = [*([(0, 0.9)] for _ in range(scored_chunks)), []]
    _, contigs = call(frames, None, threshold, scores=scores)
    assert contigs.tiers == [tier]
    assert contigs.scored_chunks.tolist() == [scored_chunks]


def test_novel_contigs_are_unsure() -> None:
    _, contigs = call([[(0, 0.9)]] * 5, scores=scores_of([0.9] * 5, 0.99, is_novel=True))
    assert contigs.tiers == ["unsure"]


def test_chunks_and_contigs_are_called_by_their_own_scores_and_classed_on_the_side_of_the_call() -> None:
    scores = scores_of([0.2, np.nan, 0.6, 0.4], 0.5)
    frames: Frames = [[(0, 0.9)], [], [(3, 0.1), (4, 0.3)], [(1, 0.5)]]
    chunks, contigs = call(frames, scores=scores)
    assert chunks.is_virus.tolist() == [False, False, True, False]
    assert chunks.classes is not None
    assert chunks.classes.tolist() == [2, -1, 1, 2]
    assert chunks.best_frame.tolist() == [0, NO_FRAME, 3, 1]
    assert contigs.classes is not None
    found = (contigs.is_virus.tolist(), contigs.classes.tolist(), contigs.viral_chunks.tolist())
    assert found == ([True], [1], [1])
    assert contigs.mean_p.tolist() == pytest.approx([0.4])
    _, other = call(frames, None, 0.6, scores=scores)
    assert other.classes is not None
    assert (other.is_virus.tolist(), other.classes.tolist()) == ([False], [2])
