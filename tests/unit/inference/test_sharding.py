"""Where shards begin and end."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_models import MadeRun
from virnuc_core.errors import UsageError
from virnuc_core.inference import sharding
from virnuc_core.inference.sharding import cut_rows, plan_shards


def costs_from(costs: list[float]) -> Callable[[int, int], npt.NDArray[np.float64]]:
    return lambda begin, end: np.array(costs[begin:end])


def letters_from(letters: list[int]) -> Callable[[int, int], npt.NDArray[np.int64]]:
    return lambda begin, end: np.array(letters[begin:end], np.int64)


def bounds(
    costs: list[float],
    groups: list[int],
    target: float,
    max_rows: int = 1000,
    letters: list[int] | None = None,
    max_letters: int = 1000,
) -> list[tuple[int, int]]:
    shards = cut_rows(
        costs_from(costs),
        letters_from(letters or [0] * len(costs)),
        np.array(groups, np.int64),
        target,
        max_rows=max_rows,
        max_letters=max_letters,
    )
    return [(shard.begin, shard.end) for shard in shards]


def test_equal_rows_are_cut_evenly() -> None:
    assert bounds([1.0] * 9, list(range(9)), 3.0) == [(0, 3), (3, 6), (6, 9)]
    assert bounds([1.0] * 10, list(range(10)), 3.4) == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_a_group_is_never_cut() -> None:
    assert bounds([1.0] * 6, [0, 0, 0, 0, 1, 2], 2.0) == [(0, 4), (4, 6)]


def test_a_costly_row_is_alone() -> None:
    assert bounds([1.0, 100.0, 1.0], [0, 1, 2], 10.0) == [(0, 1), (1, 2), (2, 3)]


def test_shards_are_even_also_where_groups_do_not_fit_exactly() -> None:
    groups = [row // 3 for row in range(300)]
    sizes = [end - begin for begin, end in bounds([1.0] * 300, groups, 31.0)]
    assert len(sizes) == 10
    assert max(sizes) - min(sizes) <= 3


def test_rows_are_bounded_too() -> None:
    assert bounds([0.0] * 5, list(range(5)), 1.0, max_rows=2) == [(0, 2), (2, 4), (4, 5)]


def test_letters_are_bounded_too() -> None:
    rows = list(range(6))
    assert bounds([0.0] * 6, rows, 1.0, letters=[400] * 6) == [(0, 2), (2, 4), (4, 6)]
    assert bounds([1.0] * 6, rows, 9.0, letters=[400] * 6) == [(0, 2), (2, 4), (4, 6)]
    assert bounds([0.0] * 3, rows[:3], 1.0, letters=[1, 5000, 1]) == [(0, 1), (1, 2), (2, 3)]


def test_letters_change_nothing_where_they_are_few() -> None:
    groups = [row // 3 for row in range(300)]
    few = bounds([1.0] * 300, groups, 31.0, letters=[10] * 300)
    assert few == bounds([1.0] * 300, groups, 31.0)


def test_long_sequences_make_small_shards(finished_run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    store, models = finished_run.store, finished_run.plan.models
    assert store.protein is not None
    assert store.dna is not None
    letters = store.protein.lengths + store.dna.lengths
    [whole] = plan_shards(store, models, "cpu", 1e6)
    monkeypatch.setattr(sharding, "MAX_SHARD_LETTERS", int(letters.sum()) // 4)
    shards = plan_shards(store, models, "cpu", 1e6)
    assert len(shards) >= 4
    assert (shards[0].begin, shards[-1].end) == (whole.begin, whole.end)
    assert all(letters[shard.begin : shard.end].sum() <= letters.sum() // 4 for shard in shards)


def test_nothing_gives_no_shards() -> None:
    assert bounds([], [], 1.0) == []


@given(
    st.lists(
        st.tuples(st.floats(0.001, 10), st.integers(0, 500), st.integers(1, 6)), min_size=1, max_size=60
    ),
    st.floats(0.01, 50),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.integers(1, 70),
)
def test_all_rows_once_in_order(
    chunks: list[tuple[float, int, int]], target: float, max_rows: int, max_letters: int, block_rows: int
) -> None:
    groups = [i for i, (_, _, rows) in enumerate(chunks) for _ in range(rows)]
    costs = [chunks[i][0] for i in groups]
    letters = [chunks[i][1] for i in groups]
    cut = partial(
        cut_rows,
        costs_from(costs),
        letters_from(letters),
        np.array(groups, np.int64),
        target,
        max_rows=max_rows,
        max_letters=max_letters,
    )
    shards = cut()
    assert shards == cut(block_rows=block_rows)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert (shards[0].begin, shards[-1].end) == (0, len(groups))
    for left, right in pairwise(shards):
        assert left.end == right.begin
        assert groups[left.end - 1] != groups[right.begin]
    for shard in shards:
        assert shard.begin < shard.end
        assert shard.cost == pytest.approx(sum(costs[shard.begin : shard.end]), abs=1e-5)
        if groups[shard.begin] != groups[shard.end - 1]:
            assert shard.cost <= target * (1 + 1e-6)
            assert shard.end - shard.begin <= max_rows
            assert sum(letters[shard.begin : shard.end]) <= max_letters


def test_a_gpu_has_larger_shards_than_a_cpu(finished_run: MadeRun) -> None:
    models = finished_run.plan.models
    costs = [sum(s.cost for s in plan_shards(finished_run.store, models, d)) for d in ("cpu", "cuda:0")]
    assert costs[1] < costs[0]
    assert plan_shards(finished_run.store, models, "cuda:0") == plan_shards(
        finished_run.store, models, "cuda:5"
    )


def test_a_slower_arithmetic_costs_more(finished_run: MadeRun) -> None:
    def cost(**changes: object) -> float:
        models = tuple(replace(model, **changes) for model in finished_run.plan.models)
        return sum(shard.cost for shard in plan_shards(finished_run.store, models, "cuda:0"))

    costs = [cost(precision=precision) for precision in ("fp8", "fp16", "bf16", "fp32")]
    assert costs[0] < costs[1] == costs[2] < costs[3]
    assert cost(precision="fp32", engine="reference") > costs[3]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_size_that_means_nothing_is_refused(finished_run: MadeRun, seconds: float) -> None:
    with pytest.raises(UsageError, match="--shard-seconds"):
        plan_shards(finished_run.store, finished_run.plan.models, "cpu", seconds)
