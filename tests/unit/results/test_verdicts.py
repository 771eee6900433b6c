"""Calls of chunks and contigs, against the rules written out one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.results.verdicts import (
    NO_FRAME,
    OTHER,
    UNSCORED,
    VIRUS,
    ChunkVerdicts,
    call_chunks,
    call_contig,
    sum_contigs,
    tier_contig,
)


def call(frames: list[list[tuple[int, float]]]) -> ChunkVerdicts:
    """Calls chunks given as lists of (frame number, P(virus))."""
    rows = [(chunk, frame, p) for chunk, several in enumerate(frames) for frame, p in several]
    scores = np.array([(1 - p, p) for _, _, p in rows], np.float32).reshape(-1, 2)
    chunks = np.array([row[0] for row in rows], np.int64)
    numbers = np.array([row[1] for row in rows], np.uint8)
    return call_chunks(scores, chunks, numbers, len(frames))


def test_the_highest_scores_decide() -> None:
    verdicts = call([[(0, 0.9), (3, 0.2)], [(1, 0.6), (2, 0.1)], [(5, 0.3)]])
    assert verdicts.is_virus.tolist() == [True, False, False]
    assert verdicts.p_virus.tolist() == pytest.approx([0.6, 0.289898, 0.3], abs=1e-5)
    assert verdicts.best_frame.tolist() == [0, 2, 5]


def test_a_tie_is_virus() -> None:
    verdicts = call([[(0, 0.75), (1, 0.25)], [(2, 0.5)]])
    assert verdicts.is_virus.tolist() == [True, True]
    assert verdicts.p_virus.tolist() == [0.5, 0.5]


def test_certain_frames() -> None:
    verdicts = call(
        [[(0, 1.0), (1, 0.0)], [(0, 1.0), (1, 0.5)], [(0, 0.0), (1, 0.5)], [(2, 1.0)], [(2, 0.0)]]
    )
    assert verdicts.p_virus.tolist() == [0.5, 1.0, 0.0, 1.0, 0.0]
    assert verdicts.is_virus.tolist() == [True, True, False, True, False]


def test_the_first_of_equally_decided_frames() -> None:
    assert call([[(1, 0.75), (4, 0.25), (5, 0.75)]]).best_frame.tolist() == [1]


def test_chunks_without_a_frame() -> None:
    verdicts = call([[], [(2, 0.8)], []])
    assert verdicts.is_scored.tolist() == [False, True, False]
    assert verdicts.best_frame.tolist() == [NO_FRAME, 2, NO_FRAME]
    assert np.isnan(verdicts.p_virus).tolist() == [True, False, True]
    assert not call([[], []]).is_scored.any()
    assert len(call([]).is_scored) == 0


def test_contigs() -> None:
    verdicts = call([[(0, 0.9)], [], [(0, 0.4)], [(1, 0.1)], []])
    totals = sum_contigs(verdicts, np.array([0, 0, 0, 1, 2]), 3)
    assert totals.chunks.tolist() == [3, 1, 1]
    assert totals.scored_chunks.tolist() == [2, 1, 0]
    assert totals.viral_chunks.tolist() == [1, 0, 0]
    assert totals.p_sum.tolist() == pytest.approx([1.3, 0.1, 0.0])


@pytest.mark.parametrize(
    ("scored", "p_sum", "expected"), [(2, 1.3, VIRUS), (2, 1.0, VIRUS), (2, 0.99, OTHER), (0, 0.0, UNSCORED)]
)
def test_call_contig(scored: int, p_sum: float, expected: str) -> None:
    assert call_contig(scored, p_sum) == expected


PROBABILITY = st.floats(0, 1, width=32)


@given(PROBABILITY, PROBABILITY)
def test_p_virus_is_at_least_half_exactly_where_the_original_says_virus(other: float, virus: float) -> None:
    for pair in ((other, virus), (virus, np.nextafter(np.float32(virus), np.float32(1)))):
        scores = np.array([pair], np.float32)
        [p_virus] = call_chunks(scores, np.zeros(1, np.int64), np.zeros(1, np.uint8), 1).p_virus
        assert (p_virus >= 0.5) == (scores[0, 1] >= scores[0, 0])


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.5, 0.9])
def test_a_threshold_is_where_calls_begin(threshold: float) -> None:
    below = np.nextafter(np.float32(threshold), np.float32(0))
    frames = [[(0, 0.0)], [(0, below)], [(0, threshold + 1e-6)], [(0, 1.0)], []]
    scores = np.array([(1 - p, p) for several in frames for _, p in several], np.float32)
    verdicts = call_chunks(scores, np.arange(4), np.zeros(4, np.uint8), 5, threshold)
    assert verdicts.is_virus.tolist() == [False, False, True, True, False]
    assert call_contig(4, 4 * threshold, threshold) == VIRUS
    assert call_contig(4, 4 * float(below), threshold) == OTHER


@pytest.mark.parametrize(
    ("p_virus", "threshold", "tier"),
    [(0.95, 0.9, "confident"), (0.8, 0.9, "unsure"), (0.2, 0.1, "unsure"), (0.05, 0.1, "confident")],
)
def test_a_threshold_makes_no_call_surer(p_virus: float, threshold: float, tier: str) -> None:
    viral = 9 if p_virus >= threshold else 0
    assert tier_contig(9, viral, 9 * p_virus, 0, threshold) == tier


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), PROBABILITY), max_size=6), max_size=20))
def test_any_chunks(frames: list[list[tuple[int, float]]]) -> None:
    verdicts = call(frames)
    for chunk, several in enumerate(frames):
        assert verdicts.is_scored[chunk] == bool(several)
        if several:
            pairs = [(np.float32(1 - p), np.float32(p), frame) for frame, p in several]
            is_virus = max(pair[1] for pair in pairs) >= max(pair[0] for pair in pairs)
            decided = max(pairs, key=lambda pair: abs(pair[1] - np.float32(0.5)))
            assert verdicts.is_virus[chunk] == is_virus
            assert verdicts.best_frame[chunk] == decided[2]
            assert (verdicts.p_virus[chunk] >= 0.5) == is_virus
            assert not math.isnan(verdicts.p_virus[chunk])


@pytest.mark.parametrize(
    ("scores", "tier"),
    [
        ([], None),
        ([0.99], "unsure"),
        ([0.9, 0.9], "likely"),
        ([0.9] * 4, "likely"),
        ([0.9] * 5, "confident"),
        ([0.1] * 5, "confident"),
        ([0.98] * 4 + [0.2], "confident"),
        ([0.97] * 3 + [0.6, 0.4], "likely"),
        ([0.65] * 9, "likely"),
        ([0.6] * 9, "unsure"),
        ([0.99, 0.99, 0.99, 0.4, 0.4, 0.45], "unsure"),
        ([0.05] * 5 + [0.9] * 5, "unsure"),
    ],
)
def test_tiers_ask_for_many_chunks_that_agree(scores: list[float], tier: str | None) -> None:
    viral = sum(p >= 0.5 for p in scores)
    assert tier_contig(len(scores), viral, math.fsum(scores)) == tier


@pytest.mark.parametrize(
    ("dna_alone", "tier"), [(0, "confident"), (3, "confident"), (4, "likely"), (7, "unsure")]
)
def test_chunks_scored_by_their_dna_alone_are_no_evidence_for_a_tier(dna_alone: int, tier: str) -> None:
    assert tier_contig(8, 8, 7.6, dna_alone) == tier
