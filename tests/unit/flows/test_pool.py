"""How work is divided into lanes for a pool."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.states import Failed

from flows import pool
from flows.pool import lanes_for
from virnuc_core.errors import InputError
from virnuc_core.inference.events import LaneFailed


@pytest.mark.parametrize(
    ("seconds", "num_workers", "expected"),
    [
        (0.0, 8, 1),
        (30.0, 8, 1),  # half a minute is one lane, however many workers there are
        (600.0, 8, 8),
        (601.0, 0, 2),  # nobody is online yet
        (6000.0, 8, 16),
        (6001.0, 4, 12),
        (180.0, 8, 3),  # of a minute each, and not eight of twenty seconds
    ],
)
def test_lanes_are_a_multiple_of_the_workers(seconds: float, num_workers: int, expected: int) -> None:
    assert lanes_for(seconds, 600.0, num_workers) == expected


@given(st.floats(0, 1e9), st.floats(1, 1e4), st.integers(0, 1000))
def test_no_lane_is_longer_than_asked_for_or_much_shorter(
    seconds: float, lane_seconds: float, num_workers: int
) -> None:
    num_lanes = lanes_for(seconds, lane_seconds, num_workers)
    assert num_lanes >= 1
    assert seconds / num_lanes <= lane_seconds * (1 + 1e-9)
    assert num_lanes == 1 or seconds / num_lanes >= lane_seconds / 10 * (1 - 1e-9)
    assert num_lanes < max(1, math.ceil(seconds / lane_seconds)) + max(1, num_workers)


def test_only_a_failure_that_may_go_away_is_asked_for_again() -> None:
    transient = LaneFailed(lane=0, error="LaneError", message="it died", retryable=True)
    permanent = LaneFailed(lane=0, error="InputError", message="no such file", retryable=False)
    assert (
        pool._retry_delay_or_raise("lane 0", transient, Failed(), failures=0) == pool.RETRY_DELAYS_SECONDS[0]
    )
    with pytest.raises(InputError, match="no such file"):
        pool._retry_delay_or_raise("lane 0", permanent, Failed(), failures=0)
