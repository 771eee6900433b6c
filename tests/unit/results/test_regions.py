"""Regions from made scores."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.results.regions import (
    DEFAULT_MODEL,
    LEVELS,
    ChunkScores,
    find_regions,
    level_evidence,
    posterior,
)

NAN = float("nan")
STEP = 480  # neighbours overlap by 20 bp


def chunks_of(*contigs: list[float]) -> ChunkScores:
    """Contigs of 500-bp chunks with these scores."""
    counts = [len(scores) for scores in contigs]
    index = np.concatenate([np.arange(count) for count in counts]) if contigs else np.zeros(0)
    start = (STEP * index).astype(np.int64)
    p_virus = np.array([p for scores in contigs for p in scores], np.float64)
    return ChunkScores(
        contig=np.repeat(np.arange(len(contigs)), counts),
        start=start,
        end=start + 500,
        p_virus=p_virus,
        is_dna_alone=p_virus == 0.3,
    )


def places(*contigs: list[float]) -> list[tuple[int, int, int]]:
    """(contig, first chunk, one past the last) of the regions."""
    regions = find_regions(chunks_of(*contigs))
    return [(r.contig, r.start // STEP, r.start // STEP + r.chunks) for r in regions]


def test_an_island_is_found_to_the_chunk() -> None:
    assert places([0.05] * 20 + [0.9] * 10 + [0.05] * 20) == [(0, 20, 30)]
    [region] = find_regions(chunks_of([0.05] * 20 + [0.9] * 10 + [0.05] * 20))
    assert (region.start, region.end, region.chunks) == (20 * STEP, 29 * STEP + 500, 10)
    assert region.mean_p == pytest.approx(0.9)
    assert region.tier == "confident"


def test_islands_at_the_ends_and_two_in_one_contig() -> None:
    low, high = [0.05] * 15, [0.9] * 10
    assert places(high + low, low + high, high + low + high) == [
        (0, 0, 10),
        (1, 15, 25),
        (2, 0, 10),
        (2, 25, 35),
    ]


def test_one_stray_chunk_makes_and_breaks_nothing() -> None:
    assert places([0.05] * 20 + [0.9] + [0.05] * 20) == []
    assert places([0.9] * 20 + [0.05] + [0.9] * 20) == [(0, 0, 41)]


def test_a_region_of_moderate_scores_keeps_its_weaker_chunks() -> None:
    assert places([0.04] * 20 + [0.7, 0.35, 0.6, 0.8, 0.4, 0.7, 0.3, 0.75] + [0.04] * 20) == [(0, 20, 28)]


def test_chunks_without_a_score_go_with_their_neighbours() -> None:
    assert places([0.05] * 15 + [0.9, NAN, 0.9, NAN, NAN, 0.9, 0.9] + [0.05] * 15) == [(0, 15, 22)]


def test_a_border_without_scores_lies_midway() -> None:
    assert places([0.05] * 15 + [NAN] * 4 + [0.9] * 10 + [NAN] * 4 + [0.05] * 15) == [(0, 17, 31)]


def test_nothing_is_called_where_nothing_is_scored() -> None:
    assert places([NAN] * 9, [NAN]) == []
    # 2,500 bp are five chunks.
    assert places([NAN] * 40 + [0.9] * 6 + [NAN] * 40) == [(0, 35, 51)]
    assert places([0.9] * 4 + [NAN] * 40 + [0.9] * 4) == [(0, 0, 9), (0, 39, 48)]


@pytest.mark.parametrize("p_virus", [0.5, 0.50000001, 0.501, 0.55, 0.97, 1.0])
def test_a_single_chunk_is_a_region_when_it_is_called_virus(p_virus: float) -> None:
    [region] = find_regions(chunks_of([p_virus]))
    assert (region.start, region.end, region.chunks, region.tier) == (0, 500, 1, "unsure")
    assert find_regions(chunks_of([min(1 - p_virus, 0.49999999)])) == []


@given(st.floats(0, 1), st.floats(0.001, 0.999))
def test_so_it_is_with_any_threshold(p_virus: float, threshold: float) -> None:
    for p in (p_virus, threshold, math.nextafter(threshold, 0)):
        assert len(find_regions(chunks_of([p]), threshold=threshold)) == (p >= threshold)


def test_the_score_of_a_region_does_not_depend_on_the_threshold() -> None:
    chunks = chunks_of([0.05] * 20 + [0.97] * 10 + [0.05] * 20)
    [usual], [strict] = (find_regions(chunks, threshold=t) for t in (0.5, 0.9))
    assert strict == usual
    assert find_regions(chunks, threshold=0.99) == []


def test_tiers_ask_for_several_chunks() -> None:
    for number, tier in {1: "unsure", 2: "likely", 3: "likely", 4: "confident"}.items():
        [region] = find_regions(chunks_of([0.999] * number))
        assert region.tier == tier


def test_certainty_is_bounded() -> None:
    [region] = find_regions(chunks_of([1.0]))
    assert 15 < region.score < 16
    assert places([0.0] * 10, [1.0] * 10) == [(1, 0, 10)]


def test_no_contigs() -> None:
    assert find_regions(chunks_of()) == []


def test_contigs_do_not_know_of_each_other() -> None:
    generator = np.random.default_rng(0)
    contigs = [generator.choice([0.05, 0.4, 0.9, NAN], n).tolist() for n in (1, 7, 60, 3, 25, 60)]
    together = find_regions(chunks_of(*contigs))
    alone = [
        replace(r, contig=number)
        for number, scores in enumerate(contigs)
        for r in find_regions(chunks_of(scores))
    ]
    assert together == alone


def test_the_posterior_is_that_of_all_paths_added_up() -> None:
    chunks = chunks_of([0.9, NAN, 0.2, 0.6])
    evidence = level_evidence(chunks.p_virus, DEFAULT_MODEL)
    change = 1 - np.exp(-STEP / DEFAULT_MODEL.change_every)
    num = len(LEVELS)
    move = (1 - change) * np.eye(num) + change / num
    paths = np.einsum(
        "a,ab,b,bc,c,cd,d->abcd", evidence[0] / num, move, evidence[1], move, evidence[2], move, evidence[3]
    )
    viral = [np.moveaxis(paths, axis, 0)[num // 2 :].sum() / paths.sum() for axis in range(4)]
    np.testing.assert_allclose(posterior(chunks, evidence, DEFAULT_MODEL), viral, rtol=1e-12)
