"""The simulation of lanes against what can be worked out without it."""

import math
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.lane_model import Failures, Lanes, Outcome, Pool, cut_lanes, queue_length
from benchmarks.lane_simulation import PROCESS_RETRY_DELAYS, simulate

pytestmark = pytest.mark.slow

NEVER = Failures()
LANES = Lanes(num_shards=120, shard=60, lane=600)


def gpu_seconds(outcome: Outcome) -> float:
    return outcome.useful + outcome.starting + outcome.lost + outcome.down + outcome.idle


@pytest.mark.parametrize(("gpus", "rounds"), [(1, 12), (4, 3), (5, 3), (12, 1), (100, 1)])
def test_without_costs_the_makespan_is_whole_rounds_of_lanes(gpus: int, rounds: int) -> None:
    outcome = simulate(LANES, Pool(num_gpus=gpus), NEVER)
    assert outcome.makespan == pytest.approx(rounds * 600)
    assert outcome.useful == pytest.approx(120 * 60)
    assert outcome.wasted == pytest.approx(1 - 120 * 60 / (gpus * rounds * 600))
    assert outcome.num_lanes == 12


def test_every_lane_pays_for_its_start_and_every_shard_for_its_end() -> None:
    lanes = replace(LANES, start=20, shard_end=1)
    outcome = simulate(lanes, Pool(num_gpus=3), NEVER)
    assert outcome.makespan == pytest.approx(4 * (20 + 10 * 61))
    assert outcome.starting == pytest.approx(12 * 20)
    assert outcome.lost == pytest.approx(120)


def test_the_parent_submits_one_lane_after_another() -> None:
    outcome = simulate(LANES, Pool(num_gpus=12, submit=7), NEVER)
    assert outcome.makespan == pytest.approx(12 * 7 + 600)


def test_the_server_serves_one_lane_after_another() -> None:
    pool = Pool(num_gpus=12, server_rate=10, requests_per_lane=30)
    assert simulate(LANES, pool, NEVER).makespan == pytest.approx(12 * 3 + 600)


def test_polls_delay_a_lane_by_half_their_interval() -> None:
    pool = Pool(num_gpus=1, worker_poll=10)
    makespans = [simulate(LANES, pool, NEVER, seed).makespan for seed in range(200)]
    assert mean(makespans) == pytest.approx(12 * 605, rel=0.001)


@pytest.mark.parametrize(
    ("customers", "between", "rate", "length"),
    [
        (1, 9.0, 1.0, 0.1),  # one that is served for 1 s in 10 s
        (1000, 2.0, 50.0, 900.0),  # all but those 100 that are between two visits
        (1000, 1000.0, 2.0, 1.0),  # half of the server: as for visits at random, 0.5 / (1 - 0.5)
    ],
)
def test_length_of_the_queue_of_polls(customers: int, between: float, rate: float, length: float) -> None:
    assert queue_length(customers, between, rate) == pytest.approx(length, rel=0.01)


def test_lanes_wait_behind_polls() -> None:
    pool = Pool(num_gpus=1000, worker_poll=2, server_rate=50, requests_per_lane=10, requests_per_poll=1)
    assert pool.seconds_behind_polls == pytest.approx(10 * 900 / 50)
    calm = replace(pool, worker_poll=200)
    assert calm.seconds_behind_polls < 0.1


def test_lanes_hold_whole_shards_as_equally_many_as_possible() -> None:
    assert cut_lanes(LANES, 4) == [10] * 12
    assert cut_lanes(replace(LANES, num_shards=5, lane=120), 4) == [2, 2, 1]
    assert cut_lanes(replace(LANES, num_shards=5, lane=1), 4) == [1] * 5
    assert cut_lanes(replace(LANES, num_shards=0), 4) == []


def test_whole_rounds_give_every_gpu_the_same_number_of_lanes() -> None:
    lanes = replace(LANES, whole_rounds=True)
    assert len(cut_lanes(lanes, 8)) == 16
    pool = Pool(num_gpus=8)
    assert simulate(lanes, pool, NEVER).makespan == pytest.approx(120 * 60 / 8)
    assert simulate(replace(lanes, whole_rounds=False), pool, NEVER).makespan == pytest.approx(2 * 600)


def expected_seconds_of_a_shard(shard: float, mtbf: float, restart: float) -> float:
    """Until a piece of work succeeds that is begun again after each failure: (M + R) (e^(S/M) - 1)."""
    return (mtbf + restart) * math.expm1(shard / mtbf)


def test_a_shard_is_begun_again_after_each_failure() -> None:
    # The flow run dies; with one shard a lane, nothing but that shard is lost, and its worker waits.
    failures = Failures(run_mtbf=300.0, run_noticed=30.0)
    lanes = Lanes(num_shards=400, shard=200, lane=200)
    pool = Pool(num_gpus=1)
    makespans = [simulate(lanes, pool, failures, seed).makespan for seed in range(40)]
    # Other lanes are there meanwhile, so the delay until it is submitted again costs nothing.
    assert mean(makespans) == pytest.approx(400 * expected_seconds_of_a_shard(200, 300, 30), rel=0.03)


def test_only_the_unfinished_shard_is_lost_when_a_process_dies() -> None:
    # At most one death a lane, so each one costs the first delay, the models, and half a shard or so.
    failures = Failures(process_mtbf=50_000.0)
    lanes = Lanes(num_shards=3000, shard=60, lane=600, reload=12)
    outcomes = [simulate(lanes, Pool(num_gpus=4), failures, seed) for seed in range(60)]
    deaths = sum(outcome.failures for outcome in outcomes)
    lost = sum(outcome.lost for outcome in outcomes)
    assert deaths == pytest.approx(60 * 3000 * 60 / 50_000, rel=0.15)
    assert lost / deaths == pytest.approx(PROCESS_RETRY_DELAYS[0] + 30, rel=0.1)
    assert sum(outcome.starting for outcome in outcomes) == pytest.approx(12 * deaths, rel=0.01)
    assert all(outcome.useful == pytest.approx(3000 * 60) for outcome in outcomes)


def test_the_best_shard_is_where_young_and_daly_say() -> None:
    """A shard's end is what a checkpoint costs them: the best length is about sqrt(2 * cost * MTBF)."""
    cost, mtbf = 4.0, 8_000.0
    best = math.sqrt(2 * cost * mtbf)
    failures = Failures(run_mtbf=mtbf, run_noticed=0.0)

    def wasted(shard: float) -> float:
        count = round(400_000 / shard)
        lanes = Lanes(num_shards=count, shard=shard, shard_end=cost, lane=400_000)
        outcomes = [simulate(lanes, Pool(num_gpus=1), failures, seed) for seed in range(30)]
        return mean(outcome.lost / outcome.useful for outcome in outcomes)

    at_best = wasted(best)
    assert at_best < wasted(best / 3)
    assert at_best < wasted(best * 3)
    # To the first order, half of it is the ends of shards and half is shards that were lost.
    assert at_best == pytest.approx(math.sqrt(2 * cost / mtbf), rel=0.1)


def test_the_best_lane_balances_starts_and_the_end_of_the_run() -> None:
    """Starts cost c/L of the time, the last lanes L/2 of a GPU's share T: the best L is about sqrt(2cT)."""
    start, share, gpus = 20.0, 36_000.0, 50
    best = math.sqrt(2 * start * share)

    def wasted(lane: float) -> float:
        lanes = Lanes(num_shards=round(gpus * share / 20), shard=20, lane=lane, start=start, spread=0.1)
        return mean(simulate(lanes, Pool(num_gpus=gpus), NEVER, seed).wasted for seed in range(10))

    assert wasted(best) < wasted(best / 5)
    assert wasted(best) < wasted(best * 5)
    assert wasted(best) < 1.5 * 2 * start / best


def test_a_lost_host_takes_its_gpus_and_their_lanes_are_done_elsewhere() -> None:
    failures = Failures(host_mtbf=2_000.0, host_noticed=200.0, repair=1_000.0)
    outcome = simulate(LANES, Pool(num_gpus=16), failures, seed=3)
    assert outcome.failures >= 6
    assert outcome.down > 0
    assert outcome.useful == pytest.approx(120 * 60)
    assert outcome.num_lanes > 12


def test_a_broken_gpu_is_out_until_it_is_repaired() -> None:
    failures = Failures(gpu_mtbf=3_000.0, repair=500.0)
    outcome = simulate(LANES, Pool(num_gpus=1), failures, seed=1)
    assert outcome.failures > 0
    assert outcome.down == pytest.approx(500 * outcome.failures)


@pytest.mark.parametrize("seed", range(5))
def test_all_gpu_time_is_accounted_for(seed: int) -> None:
    failures = Failures(
        process_mtbf=2_000, run_mtbf=3_000, gpu_mtbf=9_000, host_mtbf=9_000, host_noticed=100, repair=700
    )
    lanes = replace(LANES, start=15, reload=9, shard_end=0.5)
    pool = Pool(num_gpus=20, worker_poll=2, parent_poll=2, submit=0.2, server_rate=20, requests_per_lane=30)
    outcome = simulate(lanes, pool, failures, seed)
    assert gpu_seconds(outcome) == pytest.approx(20 * outcome.makespan)
    assert outcome.idle >= 0
    assert outcome.useful == pytest.approx(120 * 60)
    assert outcome == simulate(lanes, pool, failures, seed)
    assert outcome != simulate(lanes, pool, failures, seed + 1)


def test_nothing_to_do_takes_no_time() -> None:
    outcome = simulate(replace(LANES, num_shards=0), Pool(num_gpus=4), NEVER)
    assert (outcome.makespan, outcome.wasted, outcome.num_lanes) == (0, 0, 0)
