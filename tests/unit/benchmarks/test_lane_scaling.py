"""What the simulation is fed with."""

import math
from typing import Any

import pytest

from benchmarks.lane_model import Failures
from benchmarks.lane_scaling import ASSUMPTIONS, failures_of, lanes_of, pool_of, simulations, work
from virnuc_core.inference.sharding import MAX_SHARD_ROWS, SHARD_SECONDS

COSTS: dict[str, Any] = {
    "start_seconds": 20.0,
    "load_seconds": 6.0,
    "weights_seconds": 5.0,
    "submit_seconds": 0.1,
    "requests": 40.0,
    "server_requests_per_second": 60.0,
    "polls_per_second": 15.0,
    "least_poll_seconds": 2,
}


def test_two_models_take_the_sum_of_their_times() -> None:
    fp16, fp8, *_ = work()
    assert 0.9 * 620 < fp16["frames_per_second"] < 620
    assert 1.5 < fp8["frames_per_second"] / fp16["frames_per_second"] < 1.8
    assert fp16["bytes_per_frame"] == {
        "float32": 4 * 3328 + 8,
        "float16": 2 * 3328 + 8,
        "none": 8,
    }


def test_workers_poll_less_often_the_more_there_are() -> None:
    assert pool_of(1, COSTS, 1).worker_poll == 2
    many = pool_of(1000, COSTS, 1)
    # One thousand polls in that time are half of what the server can answer.
    assert 1000 / many.worker_poll == pytest.approx(15 * ASSUMPTIONS["server_share_of_polls"])
    assert pool_of(1000, COSTS, 10).worker_poll == pytest.approx(many.worker_poll / 10)


def test_a_run_is_cut_as_the_planning_does_it() -> None:
    slow = lanes_of(10**6, 100.0, 10, COSTS)
    assert slow.shard == pytest.approx(SHARD_SECONDS["cuda"])
    quick = lanes_of(10**6, 2000.0, 10, COSTS)
    assert quick.shard == pytest.approx(MAX_SHARD_ROWS / 2000)
    assert quick.num_shards == math.ceil(10**6 / MAX_SHARD_ROWS)
    assert quick.lane == 600
    assert quick.reload == 11


def test_failures_come_so_many_times_as_often() -> None:
    assert failures_of(0) == Failures()
    once, often = failures_of(1), failures_of(30)
    assert once.process_mtbf == pytest.approx(30 * often.process_mtbf)
    assert once.gpu_mtbf / 3600 == pytest.approx(82_944)
    assert once.host_mtbf / 3600 == pytest.approx(16_283, rel=1e-3)


def test_a_case_says_what_was_simulated() -> None:
    case = next(simulations(COSTS, 600.0))
    assert (case["gpus"], case["lane_minutes"], case["failures"]) == (1, 1, "as reported")
    assert 0 < case["wasted"] < 0.5
    assert case["wasted"] == pytest.approx(case["starting"] + case["lost"] + case["idle"], abs=1e-3)
