"""What the simulation of lanes is told, and what it tells: a run cut into lanes, a pool, failures, an outcome.

All times are in seconds.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often things fail, and how long it takes until that is noticed and repaired.

    Attributes:
        process_mtbf: seconds of one GPU's work between deaths of the device process.
        run_mtbf: the same for the flow-run process or its worker.
        gpu_mtbf: the same for the GPU itself.
        host_mtbf: seconds of one host between failures that take all of its GPUs.
        repair: how long a GPU or a host is out.
        run_noticed: until a dead flow run is seen as crashed, and until its worker takes work again.
        host_noticed: until missing heartbeats say that the lanes of a lost host are dead.
    """

    process_mtbf: float = math.inf
    run_mtbf: float = math.inf
    gpu_mtbf: float = math.inf
    host_mtbf: float = math.inf
    repair: float = 3600.0
    run_noticed: float = 2.0
    host_noticed: float = 540.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """How a run is cut, and what a lane costs.

    Attributes:
        num_shards: shards of the run.
        shard: work in one of them.
        shard_end: what a shard costs besides its work, during which the GPU waits.
        lane: work that a lane should have; lanes hold whole shards, as equally many as possible.
        start: from taking a lane to the first shard: process, imports, models.
        reload: the part of it that a new device process costs.
        spread: standard deviation of the speed of a lane, relative.
        whole_rounds: more lanes than `lane` asks for, so that every GPU gets the same number.
    """

    num_shards: int
    shard: float
    shard_end: float = 0.0
    lane: float
    start: float = 0.0
    reload: float = 0.0
    spread: float = 0.0
    whole_rounds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The GPUs and the server between them and the parent.

    Attributes:
        num_gpus: GPUs, each with a worker.
        gpus_per_host: GPUs that a host takes with it.
        worker_poll: how often a worker asks for work.
        parent_poll: how often the parent looks whether its lanes have ended.
        submit: what the parent takes to submit a lane.
        server_rate: requests that the server answers in a second.
        requests_per_lane: requests that a lane makes.
        requests_per_poll: requests that a worker makes each time it asks.
    """

    num_gpus: int
    gpus_per_host: int = 8
    worker_poll: float = 0.0
    parent_poll: float = 0.0
    submit: float = 0.0
    server_rate: float = math.inf
    requests_per_lane: float = 0.0
    requests_per_poll: float = 0.0

    @property
    def server_seconds_per_lane(self) -> float:
        """How long the server is busy with one lane."""
        return self.requests_per_lane / self.server_rate

    @property
    def seconds_behind_polls(self) -> float:
        """How long the requests of one lane wait, all together, behind polls of the workers."""
        if not self.requests_per_poll or math.isinf(self.server_rate):
            return 0.0
        between = self.worker_poll / self.requests_per_poll
        return self.server_seconds_per_lane * queue_length(self.num_gpus, between, self.server_rate)


def queue_length(customers: int, between: float, rate: float) -> float:
    """Mean number of customers at a server that each of them comes back to some seconds after it was served.

    The exact mean value analysis of a closed queue with exponential times: the n-th customer finds the queue
    that there is without it.
    """
    length = 0.0
    for n in range(1, customers + 1):
        response = (1 + length) / rate
        length = n * response / (between + response)
    return length


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the GPU time between submission and the end of the last lane, in GPU seconds.

    Attributes:
        makespan: wall seconds until the parent knows that all shards are done.
        useful: computing shards that were kept.
        starting: processes, imports, models.
        lost: shards that were not finished, the ends of shards, and waiting to begin again.
        down: GPUs that were out.
        idle: waiting for lanes: for the parent, the server, a poll, or the last lane of the run.
        num_lanes: lanes that were submitted, those that were submitted again included.
        failures: how many of any kind met a lane at work.
    """

    makespan: float
    useful: float
    starting: float
    lost: float
    down: float
    idle: float
    num_lanes: int
    failures: int

    @property
    def wasted(self) -> float:
        """Share of the GPU time that was there (not down) and did nothing useful."""
        there = self.useful + self.starting + self.lost + self.idle
        return 1 - self.useful / there if there else 0.0


def cut_lanes(lanes: Lanes, num_gpus: int) -> list[int]:
    """Shards of each lane, as equal as whole shards allow."""
    wanted = math.ceil(lanes.num_shards * lanes.shard / lanes.lane - 1e-9)
    if lanes.whole_rounds:
        wanted = math.ceil(wanted / num_gpus) * num_gpus
    count = min(wanted, lanes.num_shards)
    each, more = divmod(lanes.num_shards, max(1, count))
    return [each + 1] * more + [each] * (count - more)
