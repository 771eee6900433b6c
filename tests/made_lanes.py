"""Lane reports without lanes."""

from dataclasses import replace

from virnuc_core.inference.events import (
    GpuSample,
    LaneEvent,
    LaneFinished,
    LaneReport,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
    StageSeconds,
)
from virnuc_core.inference.shard import ModelCounters, ShardCounters


def at(moment: float, event: LaneEvent) -> LaneEvent:
    return replace(event, time=moment)


def started(lane: int = 0, host: str = "box", shards: tuple[int, ...] = (0, 1)) -> LaneStarted:
    rows = 10 * len(shards)
    return LaneStarted(lane=lane, device="cuda:0", host=host, pid=1, shards=shards, rows=rows)


def loaded(lane: int = 0) -> ModelsLoaded:
    return ModelsLoaded(lane=lane, device_name="NVIDIA Made")


def counters(frames: int = 10) -> ShardCounters:
    """Frames of 100 residues in half-full batches."""
    model = ModelCounters(
        name="tiny", family="esm2", sequences=frames, tokens=100 * frames, batches=2, capacity=200 * frames
    )
    return ShardCounters(frames=frames, residues=100 * frames, bases=300 * frames, models=(model,))


def done(shard: int, lane: int = 0, frames: int = 10, forward: float = 0.5) -> ShardDone:
    seconds = StageSeconds(forward=forward)
    return ShardDone(lane=lane, shard=shard, rows=frames, counters=counters(frames), seconds=seconds)


def sample(utilization: float, memory_gb: float, lane: int = 0) -> GpuSample:
    return GpuSample(lane=lane, utilization=utilization, memory_bytes=int(memory_gb * 1e9))


def finished(lane: int = 0) -> LaneFinished:
    return LaneFinished(lane=lane)


def report(lane: int = 0, begin: float = 0.0, seconds: float = 12.0, shards: int = 2) -> LaneReport:
    """A lane that loads for 2 s."""
    return LaneReport(
        lane=lane,
        host="box",
        device="cuda:0",
        device_name="NVIDIA Made",
        started=begin,
        load_seconds=2.0,
        seconds=seconds,
        shards=tuple(done(shard, lane) for shard in range(shards)),
    )
