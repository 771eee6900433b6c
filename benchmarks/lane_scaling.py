"""What a billion frames cost, and how long lanes should be on 1 to 1,000 GPUs, from what was measured.

    python -m benchmarks.lane_scaling

Reads the speeds of one GPU (forward_*, end_to_end_*, scaling_*), the costs of a lane (lane_overhead) and the speed of
indexing (frames) from benchmarks/results, and writes lane_simulation.json there, with every assumption in it. It
takes a few minutes on one core.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.lane_model import Failures, Lanes, Outcome, Pool
from benchmarks.lane_simulation import simulate
from virnuc_core.inference.sharding import MAX_SHARD_ROWS, SHARD_SECONDS
from virnuc_core.sequences.frame_store_build import build_frame_store

RESULTS: Final = Path(__file__).parent / "results"
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "contigs.fa.gz"

FRAMES: Final = (10**7, 10**8, 10**9)
GPUS: Final = (1, 8, 32, 100, 300, 1000)
LANE_MINUTES: Final = (1, 2, 5, 10, 15, 20, 30, 60)
SEEDS: Final = 3

# What is not measured here.
ASSUMPTIONS: Final[dict[str, float]] = {
    "weights_bytes": 11.4e9,  # ESM-2 3B as published, fp32
    "storage_bytes_per_second": 2e9,  # for each lane that starts
    "speed_spread": 0.02,
    "gpus_per_host": 8,
    "repair_seconds": 3600,
    "host_noticed_seconds": 260,  # a heartbeat, and the time after which it is missed
    "process_mtbf_hours": 1000,  # of a GPU's work; out of memory, lost contexts
    "run_mtbf_hours": 1000,
    "parent_poll_seconds": 2,
    "fast_server_times": 10,  # Postgres and several API processes, over SQLite and one
    "server_share_of_polls": 0.5,
}
# Unexpected interruptions of 16,384 GPUs in 54 days, of GPUs and of all else (Llama 3, arXiv 2407.21783, table 5).
REPORTED: Final = {"gpus": 16_384, "days": 54, "of_gpus": 256, "of_all_else": 163}
FAILURE_TIMES: Final = {"none": 0, "as reported": 1, "30 times": 30, "300 times": 300}

# Name, result file, precision, width of the protein model.
PROTEIN_MODELS: Final = (
    ("3B", "scaling_3B", "fp16", 2560),
    ("3B", "forward_3B", "fp8", 2560),
    ("650M", "end_to_end_650M", "fp16", 1280),
    ("650M", "forward_650M", "fp8", 1280),
)
DNA_WIDTH: Final = 768
SCORE_BYTES: Final = 8

Json = dict[str, Any]


def read(name: str) -> Json:
    """A result file."""
    document: Json = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def frames_per_second(name: str, precision: str) -> float:
    """Sequences/s of one GPU, stored sequences to shards; where only the forward pass was measured, by its share."""
    case = next(
        case
        for case in read(name)["cases"]
        if case["precision"] == precision and case["lengths"] in ("fixed:166", "fixed:500")
    )
    if case["end_to_end"]:
        return float(case["end_to_end"][0]["speed"]["sequences_per_second"])
    whole = "scaling_3B" if "3B" in name else "end_to_end_650M"
    share = float(read(whole)["cases"][0]["end_to_end"][0]["over_gpu_only"])
    return share * float(case["forward"]["sequences_per_second"])


def work() -> list[Json]:
    """GPU time and bytes for each pair of models, a frame."""
    dna = frames_per_second("end_to_end_dnabert_s", "fp16")
    rows = []
    for model, name, precision, width in PROTEIN_MODELS:
        protein = frames_per_second(name, precision)
        values = width + DNA_WIDTH
        rows.append(
            {
                "models": f"{model} {precision} + DNABERT-S fp16",
                "files": [name, "end_to_end_dnabert_s"],
                "frames_per_second": 1 / (1 / protein + 1 / dna),
                "bytes_per_frame": {
                    dtype: values * size + SCORE_BYTES
                    for dtype, size in (("float32", 4), ("float16", 2), ("none", 0))
                },
            }
        )
    return rows


def preparing() -> Json:
    """What the parent does before the first lane, a frame of 500 bp chunks: seconds of one core, and bytes."""
    measured = read("frames")["inputs"]["train.fa.gz"]
    frames_per_base = measured["500_bp"]["open_frames"] / (measured["mega_bases"] * 1e6)
    with TemporaryDirectory() as scratch:
        store = build_frame_store([str(EXAMPLE)], Path(scratch) / "frames", 500)
        size = sum(path.stat().st_size for path in (Path(scratch) / "frames").iterdir())
    return {
        "frames_per_second": 1e6 * measured["500_bp"]["frame_store_mbp_per_s"] * frames_per_base,
        "bases_per_frame": 1 / frames_per_base,
        "frame_store_bytes_per_frame": size / store.num_frames,
    }


def lane_costs() -> Json:
    """Seconds, requests and rows of a lane: the least that was measured, since the machine was not alone."""
    measured = read("lane_overhead")
    pool = measured["pool"]
    rates = {name: max(rate["answered_per_second"]) for name, rate in measured["server"]["rates"].items()}
    requests = pool["requests_per_lane"]
    is_poll = "get_scheduled_flow_runs"
    load = max(run["load_seconds"] for run in read("scaling_3B")["cases"][0]["end_to_end"])
    weights = ASSUMPTIONS["weights_bytes"] / ASSUMPTIONS["storage_bytes_per_second"]
    besides = min(pool["besides_process_seconds"]) - pool["worker_query_seconds"] / 2
    return {
        "besides_process_seconds": besides,
        "load_seconds": load,
        "weights_seconds": weights,
        "start_seconds": besides + load + weights,
        "submit_seconds": min(pool["submit_seconds"]),
        "requests": sum(n for name, n in requests.items() if is_poll not in name),
        "server_requests_per_second": rates["create a run, one client"],
        "polls_per_second": rates["poll of a pool with a full queue"],
        "least_poll_seconds": pool["worker_query_seconds"],
    }


def failures_of(times: float) -> Failures:
    """Failures so many times as often as was reported for a large training run."""
    if not times:
        return Failures()
    hours = {
        "process_mtbf": ASSUMPTIONS["process_mtbf_hours"],
        "run_mtbf": ASSUMPTIONS["run_mtbf_hours"],
        "gpu_mtbf": REPORTED["gpus"] * REPORTED["days"] * 24 / REPORTED["of_gpus"],
        "host_mtbf": REPORTED["gpus"]
        / ASSUMPTIONS["gpus_per_host"]
        * REPORTED["days"]
        * 24
        / REPORTED["of_all_else"],
    }
    return Failures(
        repair=ASSUMPTIONS["repair_seconds"],
        host_noticed=ASSUMPTIONS["host_noticed_seconds"],
        **{name: 3600 * value / times for name, value in hours.items()},
    )


def pool_of(gpus: int, costs: Json, server_times: float) -> Pool:
    """A pool whose workers ask as often as they may without taking more of the server than their share."""
    polls = costs["polls_per_second"] * server_times
    return Pool(
        num_gpus=gpus,
        gpus_per_host=int(ASSUMPTIONS["gpus_per_host"]),
        worker_poll=max(costs["least_poll_seconds"], gpus / polls / ASSUMPTIONS["server_share_of_polls"]),
        parent_poll=ASSUMPTIONS["parent_poll_seconds"],
        submit=costs["submit_seconds"] / server_times,
        server_rate=costs["server_requests_per_second"] * server_times,
        requests_per_lane=costs["requests"],
        requests_per_poll=costs["server_requests_per_second"] / costs["polls_per_second"],
    )


def lanes_of(frames: int, rate: float, minutes: float, costs: Json) -> Lanes:
    """A run over so many frames, cut as the planning does it on a GPU."""
    shard_rows = min(MAX_SHARD_ROWS, int(rate * SHARD_SECONDS["cuda"]))
    return Lanes(
        num_shards=-(-frames // shard_rows),
        shard=shard_rows / rate,
        lane=60 * minutes,
        start=costs["start_seconds"],
        reload=costs["load_seconds"] + costs["weights_seconds"],
        spread=ASSUMPTIONS["speed_spread"],
    )


def summary(outcomes: list[Outcome], pool: Pool) -> Json:
    """Means over the seeds; shares are of the GPU time that was there."""
    there = statistics.mean(pool.num_gpus * o.makespan - o.down for o in outcomes)
    shares = {
        key: statistics.mean(getattr(o, key) for o in outcomes) / there
        for key in ("starting", "lost", "idle")
    }
    return {
        "wasted": statistics.mean(outcome.wasted for outcome in outcomes),
        **shares,
        "hours": statistics.mean(outcome.makespan for outcome in outcomes) / 3600,
        "lanes": outcomes[0].num_lanes,
        "failures_met": statistics.mean(outcome.failures for outcome in outcomes),
    }


def simulations(costs: Json, rate: float) -> Iterator[Json]:
    """Every case: sizes of runs, pools and lanes; servers; failures; lanes in whole rounds."""
    fast = ASSUMPTIONS["fast_server_times"]
    cases = [(frames, server, "as reported", False) for frames in FRAMES for server in (1, fast)]
    cases += [(FRAMES[-1], fast, failures, False) for failures in FAILURE_TIMES if failures != "as reported"]
    cases += [(frames, fast, "as reported", True) for frames in FRAMES]
    for frames, server, failures, whole in cases:
        for gpus in GPUS:
            pool = pool_of(gpus, costs, server)
            for minutes in LANE_MINUTES:
                lanes = replace(lanes_of(frames, rate, minutes, costs), whole_rounds=whole)
                trouble = failures_of(FAILURE_TIMES[failures])
                outcomes = [simulate(lanes, pool, trouble, seed) for seed in range(SEEDS)]
                yield {
                    "frames": frames,
                    "server_times": server,
                    "failures": failures,
                    "whole_rounds": whole,
                    "gpus": gpus,
                    "lane_minutes": minutes,
                    "worker_poll_seconds": pool.worker_poll,
                    **{key: round(value, 5) for key, value in summary(outcomes, pool).items()},
                }


def main() -> None:
    """Simulates and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "lane_simulation.json")
    arguments = parser.parse_args()
    sets, costs = work(), lane_costs()
    rate = sets[0]["frames_per_second"]
    report = {
        "command": "python -m benchmarks.lane_scaling",
        "assumptions": ASSUMPTIONS,
        "reported_failures": REPORTED,
        "failures": {name: asdict(failures_of(times)) for name, times in FAILURE_TIMES.items() if times},
        "seeds": SEEDS,
        "work": sets,
        "preparing": preparing(),
        "lane": costs,
        "shard_rows": MAX_SHARD_ROWS,
        "simulated_models": sets[0]["models"],
    }
    # One line a case.
    cases = ",\n  ".join(json.dumps(case) for case in simulations(costs, rate))
    text = json.dumps(report, indent=1).removesuffix("\n}")
    arguments.out.write_text(f'{text},\n "simulations": [\n  {cases}\n ]\n}}\n')


if __name__ == "__main__":
    main()
