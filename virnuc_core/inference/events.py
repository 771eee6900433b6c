"""Events and reports of a lane; all of them cross process boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import time as now

from virnuc_core.inference.shard import ShardCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Wall seconds per stage of a shard; stages of different shards overlap.

    Attributes:
        tokenize: reading, deduplicating, tokenizing and packing, in the prefetch thread.
        forward: from the end of the previous shard, or the first batch, to the end of the last batch.
        score: launching the head and the copies to the host.
        write: from the arrival of the results to the file on disk, in the writer thread.
    """

    tokenize: float = 0.0
    forward: float = 0.0
    score: float = 0.0
    write: float = 0.0

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(
            tokenize=self.tokenize + other.tokenize,
            forward=self.forward + other.forward,
            score=self.score + other.score,
            write=self.write + other.write,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneEvent:
    """What happened in a lane, and when, in Unix seconds."""

    lane: int
    time: float = field(default_factory=now, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStarted(LaneEvent):
    """A lane is to compute `shards` of `rows` rows in all; none if its process only plans.

    `device` is "cpu" or "cuda:N", where N is the number or UUID of the GPU on the host.
    """

    device: str
    host: str
    pid: int
    shards: tuple[int, ...]
    rows: int

    @property
    def place(self) -> str:
        """Host and device."""
        return f"{self.host} {self.device}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsLoaded(LaneEvent):
    """Models are on the device, of this hardware."""

    device_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsComputed(LaneEvent):
    """About `rows` rows are computed since the lane started, in shards that are committed or under way."""

    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone(LaneEvent):
    """A shard of `rows` rows is committed to disk."""

    shard: int
    rows: int
    counters: ShardCounters
    seconds: StageSeconds


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample(LaneEvent):
    """GPU usage of a lane; `utilization` is a fraction of time, 0 to 1."""

    utilization: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFailed(LaneEvent):
    """A lane's process failed: class and text of the error, and whether it is retryable."""

    error: str
    message: str
    retryable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFinished(LaneEvent):
    """All shards of the lane are committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """Work of one lane over all of its processes; `host` and `device` are those of the last `LaneStarted`.

    Attributes:
        device_name: of the hardware; empty if no process loaded its models.
        started: start of the first process, in Unix seconds.
        load_seconds: process start-up and model loading.
        seconds: wall time with a process running.
        journal: name of the journal and the log in the run's folder, of a lane in a pool.
        gpu_samples: how busy its GPU was; empty on the CPU.
    """

    lane: int
    host: str
    device: str
    device_name: str
    started: float
    load_seconds: float
    seconds: float
    shards: tuple[ShardDone, ...]
    journal: str = ""
    gpu_samples: tuple[GpuSample, ...] = ()

    @property
    def gpu_use(self) -> dict[str, float]:
        """Mean utilization (0 to 1) and peak memory in GB; empty without samples."""
        if not self.gpu_samples:
            return {}
        utilization = [sample.utilization for sample in self.gpu_samples]
        return {
            "gpu_utilization": round(sum(utilization) / len(utilization), 4),
            "gpu_memory_gb": max(sample.memory_bytes for sample in self.gpu_samples) / 1e9,
        }


def lane_report(events: Sequence[LaneEvent], journal: str = "") -> LaneReport:
    """The work of one lane, from its events since a `LaneStarted`."""
    starts = [event for event in events if isinstance(event, LaneStarted)]
    loads = [event for event in events if isinstance(event, ModelsLoaded)]
    beginnings = [event for event in events if isinstance(event, LaneStarted | ModelsLoaded)]
    return LaneReport(
        lane=starts[-1].lane,
        host=starts[-1].host,
        device=starts[-1].device,
        device_name=loads[-1].device_name if loads else "",
        started=starts[0].time,
        load_seconds=sum(
            after.time - before.time
            for before, after in pairwise(beginnings)
            if isinstance(after, ModelsLoaded)
        ),
        # Without the gaps between processes.
        seconds=sum(
            after.time - before.time
            for before, after in pairwise(events)
            if not isinstance(after, LaneStarted)
        ),
        shards=tuple(event for event in events if isinstance(event, ShardDone)),
        journal=journal,
        gpu_samples=tuple(event for event in events if isinstance(event, GpuSample)),
    )
