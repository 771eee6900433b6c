"""The simulation of lanes against closed-form results, its inputs, and the counting of server requests."""

import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.lane_overhead import ROW_TABLES, Server
from benchmarks.lane_scaling import (
    ASSUMPTIONS,
    PROCESS_RETRY_DELAYS,
    Scenario,
    Simulation,
    failures_of,
    scenario_of,
    work,
)
from virnuc_core.inference.sharding import MAX_SHARD_ROWS, SHARD_SECONDS

LANES = Scenario(num_shards=120, shard=60, lane=600, num_gpus=1)
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


@pytest.mark.parametrize(
    ("changes", "makespan"),
    [
        ({"num_gpus": 1}, 12 * 600),
        ({"num_gpus": 4}, 3 * 600),
        ({"num_gpus": 5}, 120 * 60 / 5),
        ({"num_gpus": 8}, 120 * 60 / 8),
        ({"num_gpus": 100}, 2 * 60),
        ({"num_gpus": 3, "start": 20}, 7 * 20 + 2420),  # of 19 lanes
        ({"num_gpus": 12, "submit": 7}, 7 + 120 * 60 / 12),
        ({"num_gpus": 12, "server_rate": 10, "requests_per_lane": 30}, 16 * 3 + 600),
        ({"num_shards": 0}, 0),
    ],
)
def test_makespan_without_failures(changes: dict[str, Any], makespan: float) -> None:
    scenario = replace(LANES, **changes)
    run = Simulation(scenario)
    assert run.makespan == pytest.approx(makespan)
    assert run.spent["useful"] == pytest.approx(scenario.num_shards * 60)
    assert sum(run.spent.values()) == pytest.approx(scenario.num_gpus * makespan)
    assert run.spent["starting"] == pytest.approx(run.num_lanes * scenario.start)
    assert run.wasted == pytest.approx(1 - 120 * 60 / (scenario.num_gpus * makespan) if makespan else 0)


def test_polls_delay_a_lane_by_half_their_interval() -> None:
    runs = [Simulation(replace(LANES, worker_poll=10), seed) for seed in range(200)]
    assert mean(run.makespan for run in runs) == pytest.approx(12 * 605, rel=0.001)


@pytest.mark.parametrize(
    ("gpus", "between", "rate", "length"),
    [
        (1, 9.0, 1.0, 0.1),  # one worker, served for 1 s in 10 s
        (1000, 2.0, 50.0, 900.0),  # all but those 100 that are between two visits
        (1000, 1000.0, 2.0, 1.0),  # half the server's capacity: as for random arrivals, 0.5 / (1 - 0.5)
    ],
)
def test_lanes_wait_behind_polls(gpus: int, between: float, rate: float, length: float) -> None:
    polled = {"worker_poll": between, "server_rate": rate, "requests_per_lane": 10, "requests_per_poll": 1}
    scenario = replace(LANES, num_gpus=gpus, gpus_per_host=1, **polled)
    assert scenario.seconds_behind_polls == pytest.approx(10 * length / rate, rel=0.01)


def test_lanes_are_equal_parts_of_what_is_left() -> None:
    scenario = replace(LANES, num_gpus=4)
    assert [scenario.next_lane(left) for left in (100, 40, 39, 8, 7, 3, 1)] == [10, 10, 9, 2, 1, 1, 1]
    assert replace(scenario, lane=1200).next_lane(4) == 2
    assert replace(scenario, lane=1).next_lane(4) == 1


@pytest.mark.slow
def test_only_the_unfinished_shard_is_lost_when_a_process_dies() -> None:
    # At most one death per lane, so each costs the first delay, loading the models, and about half a shard.
    scenario = replace(LANES, num_shards=3000, num_gpus=4, reload=12, process_mtbf=50_000.0)
    runs = [Simulation(scenario, seed) for seed in range(60)]
    deaths = sum(run.num_failures for run in runs)
    assert deaths == pytest.approx(60 * 3000 * 60 / 50_000, rel=0.15)
    lost = sum(run.spent["lost"] for run in runs) / deaths
    assert lost == pytest.approx(PROCESS_RETRY_DELAYS[0] + 30, rel=0.1)
    assert sum(run.spent["starting"] for run in runs) == pytest.approx(12 * deaths, rel=0.01)


def test_a_lane_is_too_short_when_its_start_counts_and_too_long_when_its_tenth_does() -> None:
    """Starts cost c/L of the time. Lanes become shorter at the end, where half a lane of L/10 is idle."""
    start, share, gpus = 20.0, 36_000.0, 50
    best = math.sqrt(2 * start * share)
    base = Scenario(
        num_shards=round(gpus * share / 20), shard=20, lane=best, start=start, spread=0.1, num_gpus=gpus
    )

    def wasted(lane: float) -> float:
        return mean(Simulation(replace(base, lane=lane), seed).wasted for seed in range(3))

    assert start / best < wasted(best) < min(wasted(best / 5), wasted(best * 20), 1.5 * 2 * start / best)


@pytest.mark.parametrize("seed", range(3))
def test_all_gpu_time_is_accounted_for(seed: int) -> None:
    failures = {"process_mtbf": 2_000, "run_mtbf": 3_000, "gpu_mtbf": 2_000, "host_mtbf": 3_000}
    waits = {"host_noticed": 100, "repair": 700, "worker_poll": 2, "parent_poll": 2, "submit": 0.2}
    scenario = replace(
        LANES, num_gpus=20, start=15, reload=9, server_rate=20, requests_per_lane=30, **failures, **waits
    )
    run, again, other = Simulation(scenario, seed), Simulation(scenario, seed), Simulation(scenario, seed + 1)
    assert sum(run.spent.values()) == pytest.approx(20 * run.makespan)
    assert run.spent["useful"] == pytest.approx(120 * 60)
    assert min(run.spent.values()) > 0
    assert run.num_lanes > 12
    assert (run.makespan, run.spent) == (again.makespan, again.spent)
    assert run.makespan != other.makespan


def test_a_run_is_cut_as_the_planning_does_it_and_workers_poll_within_their_share() -> None:
    assert scenario_of(10**6, 100.0, 1, COSTS, 1).shard == pytest.approx(SHARD_SECONDS["cuda"])
    quick = scenario_of(10**6, 2000.0, 1000, COSTS, 1)
    assert quick.shard == pytest.approx(MAX_SHARD_ROWS / 2000)
    assert quick.num_shards == math.ceil(10**6 / MAX_SHARD_ROWS)
    assert 1000 / 8 / quick.worker_poll == pytest.approx(15 * ASSUMPTIONS["server_share_of_polls"])
    assert scenario_of(10**6, 2000.0, 1, COSTS, 1).worker_poll == 2


def test_inputs_are_those_measured_and_reported() -> None:
    fp16, fp8, *_ = work()
    assert 0.9 * 620 < fp16["frames_per_second"] < 620  # the sum of the times of both models
    assert 1.5 < fp8["frames_per_second"] / fp16["frames_per_second"] < 1.8
    assert fp16["bytes_per_frame"] == {"float32": 4 * 3328 + 8, "float16": 2 * 3328 + 8, "none": 8}
    once, often = failures_of(1), failures_of(30)
    assert once["process_mtbf"] == pytest.approx(30 * often["process_mtbf"])
    assert (once["gpu_mtbf"] / 3600, once["host_mtbf"] / 3600) == pytest.approx((82_944, 16_283), rel=1e-3)


def test_requests_and_rows_of_a_server_are_counted(tmp_path: Path) -> None:
    run = "flow_runs/6d1b1d4e-0a0b-4c0d-8e0f-0123456789ab"
    requests = (f"GET /api/{run}", f"GET /api/{run}", f"POST /api/{run}/set_state", "GET /a?b=1")
    lines = [f'INFO:     127.0.0.1:1 - "{request} HTTP/1.1" 200 OK' for request in requests]
    (tmp_path / "log").write_text("INFO:     Uvicorn running\n" + "\n".join(lines))
    with sqlite3.connect(tmp_path / "db") as connection:
        for name in ROW_TABLES:
            connection.execute(f"CREATE TABLE {name} (id INTEGER)")
        connection.execute("INSERT INTO log VALUES (1), (2)")
    connection.close()
    server = Server("http://127.0.0.1:1/api", tmp_path / "log", tmp_path / "db", 1.0)
    counted = {"GET /api/flow_runs/ID": 2, "POST /api/flow_runs/ID/set_state": 1, "GET /a": 1}
    assert server.requests() == counted
    assert (server.rows()["log"], server.rows()["events"]) == (2, 0)
    assert server.rows()["bytes"] == server.database.stat().st_size
