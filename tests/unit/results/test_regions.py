"""Viral regions from made scores."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.results.regions import DEFAULT_MODEL, LEVELS, best_levels, find_regions, log_odds
from virnuc_core.sequences.frames import chunk_table

NAN = float("nan")
LOW, HIGH = [0.05] * 15, [0.9] * 10


def places(*contigs: list[float]) -> list[tuple[int, int, int]]:
    """Contig, first and last chunk of the regions of contigs of 500-bp chunks with these scores; neighbours overlap by 20 bp."""
    counts = [len(scores) for scores in contigs]
    index = np.concatenate([np.arange(0), *map(np.arange, counts)])
    contig, start = np.repeat(np.arange(len(contigs)), counts), 480 * index
    scores = np.array([p for scores in contigs for p in scores], np.float64)
    found = find_regions(contig, start, start + 500, scores)
    numbered = zip(contig[found.first], index[found.first], index[found.last], strict=True)
    return [(int(number), int(first), int(last)) for number, first, last in numbered]


@pytest.mark.parametrize(
    ("contigs", "expected"),
    [
        ([[0.05] * 20 + [0.97] * 10 + [0.05] * 20], [(0, 20, 29)]),
        ([HIGH + LOW, LOW + HIGH, HIGH + LOW + HIGH], [(0, 0, 9), (1, 15, 24), (2, 0, 9), (2, 25, 34)]),
        ([[*LOW, 0.9, *LOW]], []),
        ([[*HIGH, 0.05, *HIGH]], [(0, 0, 20)]),
        ([[*LOW, 0.7, 0.35, 0.6, 0.8, 0.4, 0.7, 0.3, 0.75, *LOW]], [(0, 15, 22)]),
        ([[*LOW, 0.9, NAN, 0.9, NAN, NAN, 0.9, 0.9, *LOW]], [(0, 15, 21)]),
        ([LOW + [NAN] * 4 + HIGH + [NAN] * 4 + LOW], [(0, 17, 30)]),  # a border without scores is midway
        ([[NAN] * 9, [NAN]], []),
        ([[NAN] * 40 + [0.9] * 6 + [NAN] * 40], [(0, 35, 50)]),  # 2,500 bp are five chunks
        ([[0.9] * 4 + [NAN] * 40 + [0.9] * 4], [(0, 0, 8), (0, 39, 47)]),
        ([[0.0] * 10, [1.0] * 10], [(1, 0, 9)]),
        ([[0.5], [np.nextafter(0.5, 0)]], [(0, 0, 0)]),
        ([], []),
    ],
)
def test_places_of_regions(contigs: list[list[float]], expected: list[tuple[int, int, int]]) -> None:
    assert places(*contigs) == expected


@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_a_chunk_adds_is_bounded(number: int) -> None:
    start = 480 * np.arange(number)
    found = find_regions(np.zeros(number, np.int64), start, start + 500, np.ones(number))
    assert 15 * number < found.decibans[0] < 16 * number


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.floats(0.0, 20.0))
def test_no_path_costs_less(scores: list[float], least: float) -> None:
    values = log_odds(np.array(scores))
    in_variances = min(DEFAULT_MODEL.change_cost, DEFAULT_MODEL.most_change_cost * len(values))
    change = max(least, in_variances * values.var())

    def cost(levels: Sequence[int]) -> float:
        changes = sum(left != right for left, right in pairwise(levels))
        return float(np.sum((values - LEVELS[list(levels)]) ** 2) + change * changes)

    model = replace(DEFAULT_MODEL, least_change_cost=least)
    found = best_levels(values, np.zeros(len(values), np.int64), model).tolist()
    lowest = min(map(cost, product(range(len(LEVELS)), repeat=len(values))))
    assert cost(found) == pytest.approx(lowest, abs=1e-9)


def test_one_chunk_makes_no_region_among_others() -> None:
    for low in np.linspace(0.0, 0.49, 50).tolist():
        assert places([low] * 200 + [1.0] + [low] * 200) == []


@pytest.mark.parametrize("flank", [4, 6, 12, 40])
def test_a_region_within_a_contig_of_any_length_is_found(flank: int) -> None:
    assert places([0.05] * flank + [0.97] * 5 + [0.05] * flank) == [(0, flank, flank + 4)]


@given(st.lists(st.integers(1, 9_000), min_size=1, max_size=5), st.sampled_from([60, 300, 500]), st.data())
def test_regions_of_any_contigs(lengths: list[int], chunk_length: int, data: st.DataObject) -> None:
    """Contigs are cut as in a run."""
    table = chunk_table(np.array(lengths), chunk_length)
    count = len(table.record)
    scores = np.array(data.draw(st.lists(st.floats(0, 1) | st.just(NAN), min_size=count, max_size=count)))
    found = find_regions(table.record, table.start, table.end, scores)
    assert np.isfinite(found.decibans).all()
    assert (table.record[found.first] == table.record[found.last]).all()
    assert all(~np.isnan(scores[i : j + 1]).all() for i, j in zip(found.first, found.last, strict=True))
    assert (found.first <= found.last).all()
    is_next = np.diff(table.record[found.first]) == 0
    assert (found.first[1:][is_next] > found.last[:-1][is_next] + 1).all(), "regions do not touch"
    for number in range(len(lengths)):
        own = np.flatnonzero(table.record == number)
        alone = find_regions(np.zeros(len(own), np.int64), table.start[own], table.end[own], scores[own])
        mine = table.record[found.first] == number
        assert (own[0] + alone.first).tolist() == found.first[mine].tolist()
        assert (own[0] + alone.last).tolist() == found.last[mine].tolist()
        assert alone.decibans == pytest.approx(found.decibans[mine])
