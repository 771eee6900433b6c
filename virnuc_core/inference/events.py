"""What a lane reports while it works and when it is done; all of it crosses process borders."""

from dataclasses import dataclass

from virnuc_core.inference.shard import ShardCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Wall seconds by stage of a shard's work; the stages of different shards overlap.

    Attributes:
        tokenize: reading, finding equal sequences, tokenizing and packing, in the prefetch thread.
        forward: from the end of the shard before, or the first batch, to the end of the last batch.
        score: launching the head and the copies to the host.
        write: from the arrival of the numbers to the file on the disk, in the writing thread.
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
class LaneStarted:
    """A process of a lane has started; it takes over from an earlier process of the lane.

    Attributes:
        lane: number of the lane.
        device: "cpu" or "cuda:N", N being the number or UUID of the GPU on that machine.
        host: name of the machine.
        pid: process id on that machine.
        shards: what it is to compute; nothing for a process that only plans.
    """

    lane: int
    device: str
    host: str
    pid: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsLoaded:
    """The models are on the device, `seconds` after the start of the process."""

    lane: int
    device: str
    device_name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone:
    """A shard is on the disk."""

    lane: int
    shard: int
    counters: ShardCounters
    seconds: StageSeconds


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """What a lane's GPU is doing: `utilization` is a share of time, 0 to 1."""

    lane: int
    utilization: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFailed:
    """A process of a lane ended before its work did: class and text of the error, and whether a retry can help."""

    lane: int
    error: str
    message: str
    retryable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFinished:
    """All shards that a process was started for are on the disk, `seconds` after its start."""

    lane: int
    seconds: float


LaneEvent = LaneStarted | ModelsLoaded | ShardDone | GpuSample | LaneFailed | LaneFinished


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """The work of one lane, over all processes that worked for it.

    Attributes:
        lane: number of the lane.
        host: name of the last machine.
        device: as in `LaneStarted`.
        device_name: the name of the hardware; empty when no process got as far as loading models.
        started: when the first process started, in Unix seconds.
        load_seconds: starts of processes and loading of the models.
        seconds: wall seconds with a process at work.
        shards: what was computed, in order.
    """

    lane: int
    host: str
    device: str
    device_name: str
    started: float
    load_seconds: float
    seconds: float
    shards: tuple[ShardDone, ...]
