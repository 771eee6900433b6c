"""The cost of a billion frames, and the best lane length on 1 to 1,000 GPUs: a simulation from measurements.

    python -m benchmarks.lane_scaling

Reads the speeds of one GPU (forward_*, end_to_end_*, scaling_*), the costs of a lane (lane_overhead) and the speed of
indexing (frames) from benchmarks/results, and writes lane_simulation.json there, with every assumption. It takes a few
minutes on one core.

The discrete-event simulation has a parent that submits as many lanes as may wait, each an equal part of what is left but
neither longer than asked for nor shorter than a tenth of that; idle GPUs take them from a queue. A lane pays for its start and for requests to the server, then computes shards. A failure
is one of four: the device process dies (the lane starts another after a delay), the flow run dies (its worker takes another
lane), the GPU fails, or its host with all of its GPUs. Unfinished shards of a lane are resubmitted once the failure is
noticed; only the current shard is lost. All times are in seconds.
"""

import json
import math
import random
import statistics
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import simpy

from benchmarks.reports import EXAMPLE, RESULTS, Json, options_of
from virnuc_core.inference.sharding import MAX_SHARD_ROWS, SHARD_SECONDS
from virnuc_core.sequences.frame_store_build import build_frame_store

FRAMES: Final = (10**7, 10**8, 10**9)
GPUS: Final = (1, 8, 32, 100, 300, 1000)
LANE_MINUTES: Final = (1, 2, 5, 10, 15, 20, 30, 60)
SEEDS: Final = 3
PROCESS_RETRY_DELAYS: Final = (2.0, 10.0, 60.0)
RESUBMIT_DELAYS: Final = (5.0, 30.0, 120.0)
MIN_WAITING: Final = 16
_MOST_SUBMITTED: Final = 100
RUN_NOTICED: Final = 2.0  # until a dead flow run is marked as crashed and its worker is free

# Assumptions, not measured.
ASSUMPTIONS: Final[dict[str, float]] = {
    "weights_bytes": 11.4e9,  # ESM-2 3B as published, fp32
    "storage_bytes_per_second": 2e9,  # per starting lane
    "speed_spread": 0.02,
    "gpus_per_host": 8,
    "repair_seconds": 3600,
    "host_noticed_seconds": 260,  # a heartbeat, and the time after which it is missed
    "process_mtbf_hours": 1000,  # of a GPU's work; out of memory, lost contexts
    "run_mtbf_hours": 1000,
    "parent_poll_seconds": 2,
    "fast_server_times": 10,  # Postgres and several API processes, relative to SQLite and one
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
DNA_WIDTH, SCORE_BYTES = 768, 8

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A run divided into lanes, on a pool of GPUs that fail; `mtbf` is the mean time between failures."""

    num_shards: int
    shard: float  # work in one
    lane: float  # most work of a lane; lanes hold whole shards
    start: float = 0.0  # of a lane until its first shard
    reload: float = 0.0  # the part of it that a new device process costs
    spread: float = 0.0  # relative standard deviation of the speed of a lane
    num_gpus: int
    gpus_per_host: int = 8  # that fail together, and have one worker
    worker_poll: float = 0.0  # interval
    parent_poll: float = 0.0  # interval, for ended lanes
    submit: float = 0.0  # the parent's time for the lanes of one request
    server_rate: float = math.inf  # requests per second that the server answers
    requests_per_lane: float = 0.0
    requests_per_poll: float = 0.0  # of a worker
    process_mtbf: float = math.inf  # of a GPU's device process
    run_mtbf: float = math.inf  # of its flow run
    gpu_mtbf: float = math.inf
    host_mtbf: float = math.inf
    repair: float = 3600.0  # downtime of a GPU or a host
    host_noticed: float = 540.0  # until missing heartbeats show that the lanes of a lost host are dead

    @property
    def num_hosts(self) -> int:
        """Hosts, the last of them perhaps with fewer GPUs."""
        return -(-self.num_gpus // self.gpus_per_host)

    def next_lane(self, left: int) -> int:
        """Shards of the next lane when so many are in none."""
        wanted = max(self.lane / 10, min(self.lane, left * self.shard / self.num_gpus))
        return min(left, max(1, int(wanted / self.shard + 1e-9)))

    @property
    def seconds_behind_polls(self) -> float:
        """Total time that the requests of one lane wait behind the workers' polls.

        By exact mean value analysis of a closed queue with exponential times: the n-th worker sees the queue of n - 1.
        """
        if not self.requests_per_poll or math.isinf(self.server_rate):
            return 0.0
        between, length = self.worker_poll / self.requests_per_poll, 0.0
        for n in range(1, self.num_hosts + 1):
            response = (1 + length) / self.server_rate
            length = n * response / (between + response)
        return self.requests_per_lane / self.server_rate * length


@dataclass(slots=True)
class _Lane:
    """Remaining shards, dead device processes, and consecutive submissions without a finished shard."""

    shards: int
    restarts: int = 0
    failures: int = 0


class Simulation:
    """One run, deterministic in its arguments.

    Attributes:
        makespan: until the parent knows that all shards are done.
        spent: GPU seconds by purpose: useful (finished shards), starting, lost (unfinished shards, and waiting to
            restart), down (failed GPUs), idle (waiting for lanes).
        num_lanes, num_failures: submissions and resubmissions; failures that hit a running lane.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._case, self._rng = scenario, random.Random(seed)
        self._env = simpy.Environment()
        self._queue: simpy.Store = simpy.Store(self._env)
        self._server = simpy.Resource(self._env)
        self._behind_polls = scenario.seconds_behind_polls
        self._changed = self._env.event()  # a lane was taken, or has ended
        self._left = scenario.num_shards  # in no lane yet
        self._open = self._at_work = self.num_lanes = self.num_failures = 0
        self.spent = dict.fromkeys(("useful", "starting", "lost", "down", "idle"), 0.0)
        self._outages: list[tuple[str, float, float]] = []
        self._host_fails = [self._draw(scenario.host_mtbf) for _ in range(scenario.num_hosts)]
        for gpu in range(scenario.num_gpus):
            self._env.process(self._work(gpu))
        self._env.run(self._env.process(self._oversee()))
        self.makespan = self._env.now
        for purpose, begin, end in self._outages:  # some last longer than the run
            self.spent[purpose] += min(end, self.makespan) - begin
        self.spent["idle"] = scenario.num_gpus * self.makespan - sum(self.spent.values())

    @property
    def wasted(self) -> float:
        """Share of the available GPU time (not down) without useful work."""
        there = sum(self.spent.values()) - self.spent["down"]
        return 1 - self.spent["useful"] / there if there else 0.0

    def _oversee(self) -> Steps:
        """The parent: submits lanes while few wait, and waits for all of them."""
        while self._left or self._open:
            self._changed = self._env.event()
            lanes = []
            for _ in range(max(MIN_WAITING, self._at_work) - len(self._queue.items)):
                if self._left:
                    lanes.append(_Lane(self._case.next_lane(self._left)))
                    self._left -= lanes[-1].shards
            self._open += len(lanes)
            for begin in range(0, len(lanes), _MOST_SUBMITTED):
                yield from self._submit(lanes[begin : begin + _MOST_SUBMITTED])
            yield self._changed
            yield from self._until_polled(self._case.parent_poll)

    def _submit(self, lanes: list[_Lane]) -> Steps:
        self.num_lanes += len(lanes)
        yield self._env.timeout(self._case.submit)
        for lane in lanes:
            self._queue.put(lane)

    def _change(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _resubmit(self, lane: _Lane, noticed: float) -> Steps:
        """The rest of a lane after a growing delay, once the parent has noticed."""
        yield self._env.timeout(noticed)
        yield from self._until_polled(self._case.parent_poll)
        yield self._env.timeout(RESUBMIT_DELAYS[min(lane.failures, len(RESUBMIT_DELAYS) - 1)])
        yield from self._submit([_Lane(lane.shards, failures=lane.failures + 1)])

    def _until_polled(self, interval: float) -> Steps:
        yield self._env.timeout(self._rng.uniform(0, interval))

    def _work(self, gpu: int) -> Steps:
        """A GPU with its worker."""
        while True:
            lane = yield self._queue.get()
            failed = self._host_fails_next(gpu)
            if failed <= self._env.now:  # the GPU is down: the lane stays queued
                self._queue.put(lane)
                yield from self._be_out("down", failed + self._case.repair - self._env.now)
                continue
            yield from self._until_polled(self._case.worker_poll)
            with self._server.request() as turn:
                yield turn
                yield self._env.timeout(self._case.requests_per_lane / self._case.server_rate)
            yield self._env.timeout(self._behind_polls)
            self._at_work += 1
            self._change()
            yield from self._compute(lane, gpu)
            self._at_work -= 1

    def _compute(self, lane: _Lane, gpu: int) -> Steps:
        """A lane on a GPU, until it ends or fails."""
        shard = self._case.shard / max(0.1, self._rng.gauss(1.0, self._case.spread))
        starting = self._case.start
        while True:
            kind, lasts = self._next_failure(gpu, starting + lane.shards * shard)
            yield self._env.timeout(lasts)
            begun = max(0.0, lasts - starting)
            done = min(int(begun / shard), lane.shards - 1) if kind else lane.shards
            self.spent["starting"] += min(lasts, starting)
            self.spent["useful"] += done * shard
            self.spent["lost"] += begun - done * shard
            lane.shards -= done
            if not kind:
                self._open -= 1
                self._change()
                return
            lane.failures *= not done
            self.num_failures += 1
            if kind != "process" or lane.restarts == len(PROCESS_RETRY_DELAYS):
                yield from self._give_up(lane, kind)
                return
            yield from self._be_out("lost", PROCESS_RETRY_DELAYS[lane.restarts])
            lane.restarts += 1
            starting = self._case.reload

    def _give_up(self, lane: _Lane, kind: str) -> Steps:
        """Leaves the rest of a lane to the parent, which notices later; the GPU may be down meanwhile."""
        # On a failed GPU, every retry of the lane finds no device.
        noticed = {"gpu": sum(PROCESS_RETRY_DELAYS), "host": self._case.host_noticed}.get(kind, RUN_NOTICED)
        self._env.process(self._resubmit(lane, noticed))
        if kind in ("gpu", "host"):
            yield from self._be_out("down", self._case.repair)
        else:
            yield from self._be_out("lost", noticed)

    def _be_out(self, purpose: str, seconds: float) -> Steps:
        self._outages.append((purpose, self._env.now, self._env.now + seconds))
        yield self._env.timeout(seconds)

    def _next_failure(self, gpu: int, within: float) -> tuple[str, float]:
        """Kind and time of the first failure that hits a GPU within `within` seconds; "" for none."""
        times = {
            "process": self._draw(self._case.process_mtbf),
            "run": self._draw(self._case.run_mtbf),
            "gpu": self._draw(self._case.gpu_mtbf),
            "host": max(0.0, self._host_fails_next(gpu) - self._env.now),
        }
        kind = min(times, key=lambda name: times[name])
        return (kind, times[kind]) if times[kind] < within else ("", within)

    def _host_fails_next(self, gpu: int) -> float:
        """When the host of a GPU fails next; in the past while it is down."""
        host = gpu // self._case.gpus_per_host
        while (repaired := self._host_fails[host] + self._case.repair) <= self._env.now:
            self._host_fails[host] = repaired + self._draw(self._case.host_mtbf)
        return self._host_fails[host]

    def _draw(self, mtbf: float) -> float:
        return math.inf if math.isinf(mtbf) else self._rng.expovariate(1 / mtbf)


def read(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def frames_per_second(name: str, precision: str) -> float:
    """Sequences/s of one GPU, end to end; where only the forward pass was measured, scaled by its share."""
    cases = [case for case in read(name)["cases"] if case["precision"] == precision]
    case = next(case for case in cases if case["lengths"] in ("fixed:166", "fixed:500"))
    if case["end_to_end"]:
        return float(case["end_to_end"][0]["speed"]["sequences_per_second"])
    measured = read("scaling_3B" if "3B" in name else "end_to_end_650M")["cases"][0]["end_to_end"][0]
    return float(measured["over_gpu_only"] * case["forward"]["sequences_per_second"])


def work() -> list[Json]:
    """GPU time and bytes per frame for each pair of models."""
    dna, sets = frames_per_second("end_to_end_dnabert_s", "fp16"), []
    for model, name, precision, width in PROTEIN_MODELS:
        sizes = {"float32": 4, "float16": 2, "none": 0}
        row = {
            "models": f"{model} {precision} + DNABERT-S fp16",
            "files": [name, "end_to_end_dnabert_s"],
            "frames_per_second": 1 / (1 / frames_per_second(name, precision) + 1 / dna),
            "bytes_per_frame": {
                dtype: (width + DNA_WIDTH) * size + SCORE_BYTES for dtype, size in sizes.items()
            },
        }
        sets.append(row)
    return sets


def preparing() -> Json:
    """What the parent does before the first lane, per frame of 500-bp chunks: seconds of one core, and bytes."""
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
    """Seconds, requests and rows of a lane: minima, since other programs were running."""
    measured = read("lane_overhead")
    pool = measured["pool"]
    rates = {name: max(rate["answered_per_second"]) for name, rate in measured["server"]["rates"].items()}
    load = max(run["load_seconds"] for run in read("scaling_3B")["cases"][0]["end_to_end"])
    weights = ASSUMPTIONS["weights_bytes"] / ASSUMPTIONS["storage_bytes_per_second"]
    besides = min(pool["besides_process_seconds"]) - pool["worker_query_seconds"] / 2
    requests = pool["requests_per_lane"]
    return {
        "besides_process_seconds": besides,
        "load_seconds": load,
        "weights_seconds": weights,
        "start_seconds": besides + load + weights,
        "submit_seconds": min(pool["submit_seconds"]),
        "requests": sum(n for name, n in requests.items() if "get_scheduled_flow_runs" not in name),
        "server_requests_per_second": rates["create a run, one client"],
        "polls_per_second": rates["poll of a pool with a full queue"],
        "least_poll_seconds": pool["worker_query_seconds"],
    }


def failures_of(times: float) -> Json:
    """Fields of a scenario with `times` the failure rate reported for a large training run."""
    if not times:
        return {}
    gpu_hours = REPORTED["gpus"] * REPORTED["days"] * 24
    hours = {
        "process_mtbf": ASSUMPTIONS["process_mtbf_hours"],
        "run_mtbf": ASSUMPTIONS["run_mtbf_hours"],
        "gpu_mtbf": gpu_hours / REPORTED["of_gpus"],
        "host_mtbf": gpu_hours / ASSUMPTIONS["gpus_per_host"] / REPORTED["of_all_else"],
    }
    waits = {"repair": ASSUMPTIONS["repair_seconds"], "host_noticed": ASSUMPTIONS["host_noticed_seconds"]}
    return {**{name: 3600 * value / times for name, value in hours.items()}, **waits}


def scenario_of(frames: int, rate: float, gpus: int, costs: Json, server_times: float) -> Scenario:
    """A run in lanes of 10 minutes, planned as for GPUs; workers poll as often as their share of the server allows."""
    shard_rows = min(MAX_SHARD_ROWS, int(rate * SHARD_SECONDS["cuda"]))
    polls = costs["polls_per_second"] * server_times
    hosts = math.ceil(gpus / ASSUMPTIONS["gpus_per_host"])
    return Scenario(
        num_shards=-(-frames // shard_rows),
        shard=shard_rows / rate,
        lane=600,
        start=costs["start_seconds"],
        reload=costs["load_seconds"] + costs["weights_seconds"],
        spread=ASSUMPTIONS["speed_spread"],
        num_gpus=gpus,
        gpus_per_host=int(ASSUMPTIONS["gpus_per_host"]),
        worker_poll=max(costs["least_poll_seconds"], hosts / polls / ASSUMPTIONS["server_share_of_polls"]),
        parent_poll=ASSUMPTIONS["parent_poll_seconds"],
        submit=costs["submit_seconds"] / server_times,
        server_rate=costs["server_requests_per_second"] * server_times,
        requests_per_lane=costs["requests"],
        requests_per_poll=costs["server_requests_per_second"] / costs["polls_per_second"],
    )


def summary(runs: list[Simulation], num_gpus: int) -> Json:
    """Means over the seeds; shares are of the available GPU time."""
    mean = statistics.mean
    available = mean(num_gpus * run.makespan - run.spent["down"] for run in runs)
    purposes = ("starting", "lost", "idle")
    means = {
        "wasted": mean(run.wasted for run in runs),
        **{purpose: mean(run.spent[purpose] for run in runs) / available for purpose in purposes},
        "hours": mean(run.makespan for run in runs) / 3600,
        "lanes": runs[0].num_lanes,
        "failures_met": mean(run.num_failures for run in runs),
    }
    return {name: round(value, 5) for name, value in means.items()}


def simulations(costs: Json, rate: float) -> Iterator[Json]:
    """Every case: sizes of runs, pools and lanes; servers; failures."""
    fast = ASSUMPTIONS["fast_server_times"]
    cases = [(frames, server, "as reported") for frames in FRAMES for server in (1, fast)]
    cases += [(FRAMES[-1], fast, failures) for failures in FAILURE_TIMES if failures != "as reported"]
    for frames, server, failures in cases:
        for gpus in GPUS:
            base = scenario_of(frames, rate, gpus, costs, server)
            base = replace(base, **failures_of(FAILURE_TIMES[failures]))
            for minutes in LANE_MINUTES:
                scenario = replace(base, lane=60.0 * minutes)
                case = {"frames": frames, "server_times": server, "failures": failures}
                yield {
                    **case,
                    "gpus": gpus,
                    "lane_minutes": minutes,
                    "worker_poll_seconds": scenario.worker_poll,
                    **summary([Simulation(scenario, seed) for seed in range(SEEDS)], gpus),
                }


def main() -> None:
    """Command line."""
    parser = options_of("lane_scaling", __doc__)
    parser.set_defaults(out=RESULTS / "lane_simulation.json")
    arguments = parser.parse_args()
    sets, costs = work(), lane_costs()
    report = {
        "command": "python -m benchmarks.lane_scaling",
        "assumptions": ASSUMPTIONS,
        "reported_failures": REPORTED,
        "failures": {name: failures_of(times) for name, times in FAILURE_TIMES.items() if times},
        "seeds": SEEDS,
        "work": sets,
        "preparing": preparing(),
        "lane": costs,
        "shard_rows": MAX_SHARD_ROWS,
        "simulated_models": sets[0]["models"],
    }
    # One line a case.
    cases = ",\n  ".join(json.dumps(case) for case in simulations(costs, sets[0]["frames_per_second"]))
    text = json.dumps(report, indent=1).removesuffix("\n}")
    arguments.out.write_text(f'{text},\n "simulations": [\n  {cases}\n ]\n}}\n')


if __name__ == "__main__":
    main()
