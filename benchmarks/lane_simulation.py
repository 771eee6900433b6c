"""Lanes on 1 to 1,000 GPUs: a discrete-event simulation of a pool, its failures, and what of it is wasted.

A parent cuts the shards of a run into lanes and submits them one after another; idle GPUs take them from a queue.
A lane costs its start (a flow-run process, imports, models) and requests to the server; then it computes
shards. A shard is what is lost when something dies.

A failure is one of four: the device process dies (the lane starts another after a delay), the flow run dies (its
worker takes another lane), the GPU is out, or its host is out with all of its GPUs. What a lane leaves undone is
submitted again, as a lane, when that is noticed.

`benchmarks.lane_model` says what goes in and what comes out; `benchmarks.lane_scaling` feeds it with what was
measured.
"""

import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Literal

import simpy

from benchmarks.lane_model import Failures, Lanes, Outcome, Pool, cut_lanes

FailureKind = Literal["process", "run", "gpu", "host"]

PROCESS_RETRY_DELAYS: Final = (2.0, 10.0, 60.0)
RESUBMIT_DELAYS: Final = (5.0, 30.0, 120.0)

Steps = Generator[simpy.Event, Any, None]


def simulate(lanes: Lanes, pool: Pool, failures: Failures, seed: int = 0) -> Outcome:
    """Runs all shards once, failures and all; the same arguments give the same outcome."""
    return _Run(lanes, pool, failures, random.Random(seed)).outcome()


@dataclass(slots=True)
class _Lane:
    """A lane in the queue or on a GPU.

    Attributes:
        shards: how many are left.
        restarts: device processes that died since it was submitted.
        failures: times in a row that it was given up without a shard.
    """

    shards: int
    restarts: int = 0
    failures: int = 0


class _Run:
    """One run of the simulation: the clock, the queue, and the sums."""

    def __init__(self, lanes: Lanes, pool: Pool, failures: Failures, rng: random.Random) -> None:
        self._lanes, self._pool, self._failures, self._rng = lanes, pool, failures, rng
        self._env = simpy.Environment()
        self._queue: simpy.Store = simpy.Store(self._env)
        self._server = simpy.Resource(self._env)
        self._behind_polls = pool.seconds_behind_polls
        self._lane_ended = self._env.event()
        self._open = self._num_lanes = self._num_failures = 0
        self._spent = dict.fromkeys(("useful", "starting", "lost", "down"), 0.0)
        self._outages: list[tuple[str, float, float]] = []
        num_hosts = -(-pool.num_gpus // pool.gpus_per_host)
        self._host_fails = [self._draw(failures.host_mtbf) for _ in range(num_hosts)]

    def outcome(self) -> Outcome:
        """Runs to the end and sums up."""
        for gpu in range(self._pool.num_gpus):
            self._env.process(self._work(gpu))
        self._env.run(self._env.process(self._oversee()))
        makespan = self._env.now
        for purpose, begin, end in self._outages:  # some last longer than the run
            self._spent[purpose] += min(end, makespan) - begin
        return Outcome(
            makespan=makespan,
            idle=self._pool.num_gpus * makespan - sum(self._spent.values()),
            num_lanes=self._num_lanes,
            failures=self._num_failures,
            **self._spent,
        )

    def _oversee(self) -> Steps:
        """The parent: submits one lane after another, and waits for all of them."""
        sizes = cut_lanes(self._lanes, self._pool.num_gpus)
        self._open = len(sizes)
        for size in sizes:
            yield from self._submit(_Lane(size))
        while self._open:
            self._lane_ended = self._env.event()
            yield self._lane_ended
        yield from self._until_polled(self._pool.parent_poll)

    def _submit(self, lane: _Lane) -> Steps:
        self._num_lanes += 1
        yield self._env.timeout(self._pool.submit)
        self._queue.put(lane)

    def _submit_again(self, lane: _Lane, noticed: float) -> Steps:
        """What a lane left undone, when the parent has seen that, after a delay that grows."""
        yield self._env.timeout(noticed)
        yield from self._until_polled(self._pool.parent_poll)
        yield self._env.timeout(RESUBMIT_DELAYS[min(lane.failures, len(RESUBMIT_DELAYS) - 1)])
        yield from self._submit(_Lane(lane.shards, failures=lane.failures + 1))

    def _until_polled(self, interval: float) -> Steps:
        """Until somebody looks who does so at an interval, and has not begun with this."""
        yield self._env.timeout(self._rng.uniform(0, interval))

    def _work(self, gpu: int) -> Steps:
        """A GPU with its worker: takes lanes for ever."""
        while True:
            lane = yield self._queue.get()
            back = self._host_fails_next(gpu) + self._failures.repair
            if back - self._failures.repair <= self._env.now:  # it is out: the lane stays where it is
                self._queue.put(lane)
                yield from self._be_out("down", back - self._env.now)
                continue
            yield from self._until_polled(self._pool.worker_poll)
            with self._server.request() as turn:
                yield turn
                yield self._env.timeout(self._pool.server_seconds_per_lane)
            yield self._env.timeout(self._behind_polls)
            yield from self._compute(lane, gpu)

    def _compute(self, lane: _Lane, gpu: int) -> Steps:
        """A lane on a GPU, until it has ended in one way or another."""
        speed = max(0.1, self._rng.gauss(1.0, self._lanes.spread))
        shard = self._lanes.shard / speed
        step = shard + self._lanes.shard_end
        starting = self._lanes.start
        while True:
            kind, lasts = self._next_failure(gpu, starting + lane.shards * step)
            yield self._env.timeout(lasts)
            begun = max(0.0, lasts - starting)
            done = lane.shards if kind is None else min(int(begun / step), lane.shards - 1)
            self._spent["starting"] += min(lasts, starting)
            self._spent["useful"] += done * shard
            self._spent["lost"] += begun - done * shard
            lane.shards -= done
            if kind is None:
                self._end()
                return
            lane.failures *= not done
            self._num_failures += 1
            if kind != "process" or lane.restarts == len(PROCESS_RETRY_DELAYS):
                yield from self._give_up(lane, kind)
                return
            yield from self._be_out("lost", PROCESS_RETRY_DELAYS[lane.restarts])
            lane.restarts += 1
            starting = self._lanes.reload

    def _give_up(self, lane: _Lane, kind: FailureKind) -> Steps:
        """Leaves the rest of a lane to the parent, who hears of it later; the GPU may be out meanwhile."""
        noticed = self._failures.run_noticed
        if kind == "gpu":  # the lane finds no device, as often as it tries
            noticed = sum(PROCESS_RETRY_DELAYS)
        elif kind == "host":
            noticed = self._failures.host_noticed
        self._env.process(self._submit_again(lane, noticed))
        if kind in ("gpu", "host"):
            yield from self._be_out("down", self._failures.repair)
        else:
            yield from self._be_out("lost", noticed)

    def _end(self) -> None:
        """A lane has ended well."""
        self._open -= 1
        if not self._lane_ended.triggered:
            self._lane_ended.succeed()

    def _be_out(self, purpose: str, seconds: float) -> Steps:
        self._outages.append((purpose, self._env.now, self._env.now + seconds))
        yield self._env.timeout(seconds)

    def _next_failure(self, gpu: int, within: float) -> tuple[FailureKind | None, float]:
        """The first failure that meets a GPU within some seconds, and when; None for none."""
        times: dict[FailureKind, float] = {
            "process": self._draw(self._failures.process_mtbf),
            "run": self._draw(self._failures.run_mtbf),
            "gpu": self._draw(self._failures.gpu_mtbf),
            "host": max(0.0, self._host_fails_next(gpu) - self._env.now),
        }
        kind = min(times, key=lambda name: times[name])
        return (kind, times[kind]) if times[kind] < within else (None, within)

    def _host_fails_next(self, gpu: int) -> float:
        """When the host of a GPU fails next; in the past while it is out."""
        host = gpu // self._pool.gpus_per_host
        while self._host_fails[host] + self._failures.repair <= self._env.now:
            repaired = self._host_fails[host] + self._failures.repair
            self._host_fails[host] = repaired + self._draw(self._failures.host_mtbf)
        return self._host_fails[host]

    def _draw(self, mtbf: float) -> float:
        return math.inf if math.isinf(mtbf) else self._rng.expovariate(1 / mtbf)
