"""How shards are divided into the lanes of a pool."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.pool import divide


@given(
    costs=st.lists(st.floats(0.01, 100.0), max_size=60),
    lane_seconds=st.floats(0.1, 1000.0),
    num_slots=st.integers(1, 30),
)
def test_every_shard_is_in_one_lane_in_order(costs: list[float], lane_seconds: float, num_slots: int) -> None:
    parts = list(divide(costs, lane_seconds, num_slots))
    assert [shard for part in parts for shard in part] == list(range(len(costs)))
    assert all(len(part) == 1 or sum(costs[i] for i in part) <= lane_seconds * 1.001 for part in parts)


@pytest.mark.parametrize(
    ("num_slots", "lane_seconds", "sizes"),
    [
        (1, 1000.0, [100]),  # no longer than the work
        (1, 40.0, [40, 40, 20]),
        (4, 1000.0, [100]),  # no shorter than a tenth
        (4, 40.0, [25, 18, 14, 10, 8, 6, 4, 4, 4, 4, 3]),  # shorter and shorter, to end together
    ],
)
def test_lanes_are_of_the_length_asked_for_and_end_together(
    num_slots: int, lane_seconds: float, sizes: list[int]
) -> None:
    parts = list(divide([1.0] * 100, lane_seconds, num_slots))
    found = [len(part) for part in parts]
    assert sum(found) == 100
    assert all(before >= after for before, after in pairwise(found))
    assert found[0] == sizes[0]
    if num_slots == 1:
        assert found == sizes
