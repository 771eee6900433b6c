"""How the work of a run is divided into lanes for a pool, and what becomes of lanes that fail."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.pool import RETRY_DELAYS_SECONDS, Backlog, Lane
from virnuc_core.errors import CheckpointError, DeviceLostError, LaneError, VirnucError

SICK, GOOD, OTHER = "host1 cuda:0", "host2 cuda:0", "host3 cuda:0"
LOST = (DeviceLostError, "the GPU fell off the bus.")


def backlog_of(costs: Sequence[float], lane_seconds: float = 600.0) -> Backlog:
    return Backlog(costs, range(len(costs)), lane_seconds, first=0)


def take_all(backlog: Backlog, num_slots: int) -> list[Lane]:
    lanes = []
    while lane := backlog.take(num_slots):
        lanes.append(lane)
    return lanes


@pytest.mark.parametrize(
    ("num_shards", "num_slots", "expected"),
    [
        (0, 8, []),
        (1, 8, [1]),
        (30, 1, [10, 10, 10]),  # as long as asked for
        (30, 4, [7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]),  # equal parts of what is left
        (5, 100, [1] * 5),  # not shorter than a tenth
    ],
)
def test_lanes_become_shorter_towards_the_end(num_shards: int, num_slots: int, expected: list[int]) -> None:
    """Shards of a minute."""
    lanes = take_all(backlog_of([60.0] * num_shards), num_slots)
    assert [len(lane.shards) for lane in lanes] == expected


@given(
    st.lists(st.floats(0.001, 100.0), max_size=50),
    st.floats(0.01, 1e4),
    st.integers(1, 1000),
    st.integers(0, 9),
)
def test_every_shard_is_in_one_lane(
    costs: list[float], lane_seconds: float, num_slots: int, first: int
) -> None:
    lanes = take_all(Backlog(costs, range(len(costs)), lane_seconds, first), num_slots)
    assert [shard for lane in lanes for shard in lane.shards] == list(range(len(costs)))
    assert [lane.number for lane in lanes] == list(range(first, first + len(lanes)))
    for lane in lanes:
        assert len(lane.shards) == 1 or sum(costs[shard] for shard in lane.shards) <= lane_seconds * (
            1 + 1e-9
        )


def fail(backlog: Backlog, lane: Lane, device: str | None, times: int = 1) -> Lane | None:
    retry: Lane | None = lane
    for _ in range(times):
        assert retry is not None
        retry = backlog.retry(retry, retry.shards, device, LOST)
    return retry


def test_a_lane_is_set_aside_after_three_failures_and_tried_again_at_the_end() -> None:
    backlog = backlog_of([1.0, 1.0])
    lane = Lane(number=0, shards=(0,))
    retry = fail(backlog, lane, GOOD, times=2)
    assert retry == Lane(number=0, shards=(0,), attempt=2, failures=2)
    assert fail(backlog, retry, OTHER) is None
    assert backlog.take_second_round() == []  # nothing has been finished since
    backlog.on_shard(GOOD)
    [again] = backlog.take_second_round()
    assert (again.shards, again.attempt, again.failures) == ((0,), 3, 0)
    assert backlog.take_second_round() == []
    assert fail(backlog, again, GOOD, times=3) is None
    assert backlog.take_second_round() == []
    error = backlog.error(1)
    assert isinstance(error, DeviceLostError)
    assert str(error).startswith("1 of 2 shards could not be computed: lane 0: the GPU fell off the bus. ")


def test_progress_starts_the_count_anew() -> None:
    backlog = backlog_of([1.0] * 3)
    tried = fail(backlog, Lane(number=0, shards=(0, 1, 2)), GOOD, times=2)
    assert tried is not None
    assert backlog.retry(tried, (2,), GOOD, LOST) == Lane(number=0, shards=(2,), attempt=3)


def test_a_device_that_fails_everything_is_not_held_against_lanes_while_others_work() -> None:
    backlog = backlog_of([1.0] * 3)
    backlog.on_shard(GOOD)
    lane = fail(backlog, Lane(number=0, shards=(0,)), SICK, times=20)
    assert lane is not None
    assert lane.failures == 1  # it might have been the lane
    other = fail(backlog, Lane(number=1, shards=(1,)), SICK)
    assert other is not None
    assert other.failures == 0
    assert fail(backlog, lane, OTHER) is not None
    assert fail(backlog, lane, GOOD) is not None
    # Nobody works any more: from here on all failures count.
    assert fail(backlog, other, SICK, times=3) is None


def test_a_lane_that_did_not_start_has_not_failed() -> None:
    backlog = backlog_of([1.0])
    lane = fail(backlog, Lane(number=0, shards=(0,)), None, times=9)
    assert lane is not None
    assert lane.failures == 0
    assert not backlog.is_hopeless([], num_lanes=1)
    fail(backlog, lane, None)
    assert backlog.is_hopeless([], num_lanes=1)
    assert not backlog.is_hopeless([], num_lanes=10)  # three times each
    assert not backlog.is_hopeless([GOOD], num_lanes=1)
    backlog.on_start()
    assert not backlog.is_hopeless([], num_lanes=1)


def test_a_run_is_given_up_when_one_lane_after_another_fails_everywhere() -> None:
    backlog = backlog_of([1.0] * 20)
    for number in range(10):
        fail(backlog, Lane(number=number, shards=(number,)), (SICK, OTHER)[number % 2])
    assert backlog.is_hopeless([SICK, OTHER], num_lanes=3)
    assert not backlog.is_hopeless([SICK, GOOD], num_lanes=3)
    backlog.on_shard(OTHER)
    assert not backlog.is_hopeless([SICK], num_lanes=3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [([CheckpointError] * 2, CheckpointError), ([CheckpointError, LaneError], LaneError)],
)
def test_all_reasons_are_told(kinds: list[type[VirnucError]], expected: type[VirnucError]) -> None:
    backlog = backlog_of([1.0] * 30)
    for number in range(9):
        reason = (kinds[number % 2], f"reason {number % 7}.")
        backlog.retry(Lane(number=number, shards=(number,)), (number,), GOOD, reason)
    error = backlog.error(9)
    assert type(error) is expected
    assert str(error).startswith(
        "9 of 30 shards could not be computed: lane 0, 7: reason 0.; lane 1, 8: reason 1.;"
    )
    assert "lane 4: reason 4.; and 2 more reasons Finished shards are kept" in str(error)


def test_the_delay_grows() -> None:
    delays = [Lane(number=0, shards=(0,), attempt=attempt).delay for attempt in range(6)]
    assert delays == [0.0, *RETRY_DELAYS_SECONDS, RETRY_DELAYS_SECONDS[-1], RETRY_DELAYS_SECONDS[-1]]
