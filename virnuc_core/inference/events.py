"""What a lane tells while it works, and when it is done; all of it crosses process borders."""

from dataclasses import dataclass

from virnuc_core.shard_file import ShardCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Wall seconds by stage of a shard's work; the stages of different shards overlap.

    Attributes:
        tokenize: reading, finding equal sequences, tokenizing and packing, in a thread ahead.
        forward: from the end of the shard before, or the first batch, to the end of the last batch.
        score: launching the head and the way back to the host.
        write: from the arrival of the numbers to the file on the disk, in a thread behind.
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
class ModelsLoaded:
    """A lane's process is up and its models are on the device; `seconds` is how long that took."""

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


LaneEvent = ModelsLoaded | ShardDone


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """One lane from the start of its process to its end.

    Attributes:
        lane: number of the lane.
        device: as torch calls it, seen from the parent.
        device_name: the name of the hardware.
        load_seconds: start of the process and loading of the models.
        seconds: wall seconds from the start of its process to its last shard.
        shards: what was computed, in order.
    """

    lane: int
    device: str
    device_name: str
    load_seconds: float
    seconds: float
    shards: tuple[ShardDone, ...]
