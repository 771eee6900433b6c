"""Shard boundaries."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_models import MadeRun
from virnuc_core.inference import sharding
from virnuc_core.inference.sharding import RowWork, cut_rows, plan_shards


def row_work(letters: list[int], costs: list[float]) -> RowWork:
    return lambda begin, end: (np.array(letters[begin:end], np.int64), np.array(costs[begin:end], np.float64))


@pytest.mark.parametrize(
    ("costs", "groups", "letters", "limits", "expected"),
    [
        ([], [], [], (1000, 1000, 1.0), []),
        ([1.0] * 9, range(9), [0] * 9, (1000, 1000, 3.0), [3, 6, 9]),
        ([1.0] * 10, range(10), [0] * 10, (1000, 1000, 3.4), [3, 6, 9, 10]),
        ([1.0] * 6, [0, 0, 0, 0, 1, 2], [0] * 6, (1000, 1000, 2.0), [4, 6]),
        ([1.0, 100.0, 1.0], range(3), [0] * 3, (1000, 1000, 10.0), [1, 2, 3]),
        ([0.0] * 5, range(5), [0] * 5, (2, 1000, 1.0), [2, 4, 5]),
        ([1.0] * 6, range(6), [400] * 6, (1000, 1000, 9.0), [2, 4, 6]),
        ([0.0] * 3, range(3), [1, 5000, 1], (1000, 1000, 1.0), [1, 2, 3]),
    ],
    ids=["nothing", "even", "uneven", "groups", "a costly row", "rows", "letters", "a long row"],
)
def test_ends_of_shards(
    costs: list[float],
    groups: list[int],
    letters: list[int],
    limits: tuple[int, int, float],
    expected: list[int],
) -> None:
    shards = cut_rows(row_work(letters, costs), np.array(groups, np.int64), limits)
    assert [shard.end for shard in shards] == expected


@pytest.mark.parametrize(("seconds", "count"), [(1.9, 1), (9.0, 4), (16.0, 8), (400.0, 8), (500.0, 9)])
def test_a_short_run_has_eight_shards_that_are_not_too_short(seconds: float, count: int) -> None:
    work, groups = row_work([0] * 1000, [seconds / 1000] * 1000), np.arange(1000)
    assert len(cut_rows(work, groups, (1000, 1000, 60.0), 2.0)) == count


def test_shards_are_even_also_where_groups_do_not_fit_exactly() -> None:
    work, groups = row_work([0] * 300, [1.0] * 300), np.arange(300) // 3
    sizes = [shard.end - shard.begin for shard in cut_rows(work, groups, (1000, 1000, 31.0))]
    assert len(sizes) == 10
    assert max(sizes) - min(sizes) <= 3


@given(
    st.lists(
        st.tuples(st.floats(0.001, 10), st.integers(0, 500), st.integers(1, 6)), min_size=1, max_size=30
    ),
    st.tuples(st.integers(1, 40), st.integers(1, 5000), st.floats(0.01, 50)),
    st.integers(1, 70),
)
def test_all_rows_once_in_order(
    chunks: list[tuple[float, int, int]], limits: tuple[int, int, float], block_rows: int
) -> None:
    groups = [i for i, (_, _, rows) in enumerate(chunks) for _ in range(rows)]
    costs = [chunks[i][0] for i in groups]
    letters = [chunks[i][1] for i in groups]
    shards = cut_rows(row_work(letters, costs), np.array(groups, np.int64), limits)
    assert shards == cut_rows(
        row_work(letters, costs), np.array(groups, np.int64), limits, block_rows=block_rows
    )
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert (shards[0].begin, shards[-1].end) == (0, len(groups))
    for left, right in pairwise(shards):
        assert left.end == right.begin
        assert groups[left.end - 1] != groups[right.begin]
    for shard in shards:
        assert shard.begin < shard.end
        assert shard.cost == pytest.approx(sum(costs[shard.begin : shard.end]), abs=1e-5)
        if groups[shard.begin] != groups[shard.end - 1]:
            max_rows, max_letters, target = limits
            assert shard.cost <= target * (1 + 1e-6)
            assert shard.end - shard.begin <= max_rows
            assert sum(letters[shard.begin : shard.end]) <= max_letters


def test_long_sequences_make_small_shards(finished_run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    store, models = finished_run.store, finished_run.plan.models
    letters = store.protein.lengths + store.dna.lengths
    assert len(plan_shards(store, models, "cpu", 1e6)) == 1
    monkeypatch.setattr(sharding, "MAX_SHARD_LETTERS", int(letters.sum()) // 4)
    shards = plan_shards(store, models, "cpu", 1e6)
    assert len(shards) >= 4
    assert all(letters[shard.begin : shard.end].sum() <= letters.sum() // 4 for shard in shards)


def test_costs_depend_on_the_models_the_kind_of_device_and_the_arithmetic(finished_run: MadeRun) -> None:
    store, models = finished_run.store, finished_run.plan.models

    def cost(device: str = "cuda:0", **changes: object) -> float:
        changed = tuple(replace(model, **changes) for model in models)
        return sum(shard.cost for shard in plan_shards(store, changed, device))

    assert cost() < cost("cpu")
    assert plan_shards(store, models, "cuda:0") == plan_shards(store, models, "cuda:5")
    costs = [cost(precision=precision) for precision in ("fp8", "fp16", "bf16", "fp32")]
    assert costs[0] < costs[1] == costs[2] < costs[3]
    assert cost(precision="fp32", token_budget=1) > costs[3]
