"""The shards of a run: which are missing, and one lane's share of them."""

import socket
from collections.abc import Collection

from tasks.artifacts import ProgressArtifact
from tasks.stage import stage, stopping
from virnuc_core.inference import launcher
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.shard import missing_shards, pending_shards, remove_shard_temporaries
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import read_plan


@stage
def find_pending(folder: RunFolder, taken: Collection[int] = ()) -> tuple[int, ...]:
    """The shards that are not on the disk, or not whole; the latter are set aside.

    Args:
        folder: the run's folder.
        taken: shards that are being computed, to be left out; what killed lanes have left of others is removed.
    """
    stopping.clear()
    pending = tuple(shard for shard in pending_shards(folder, read_plan(folder.plan)) if shard not in taken)
    remove_shard_temporaries(folder, pending)
    return pending


@stage
def compute_shards(
    folder: RunFolder, shards: tuple[int, ...], device: str, lane: int, num_lanes: int, journal: LaneJournal
) -> None:
    """Computes shards in a process of their own; called again, it leaves out those that are there by then.

    Raises:
        LaneError: the process died.
        VirnucError: what the process raised.
        OSError: what it met when it read or wrote files.
    """
    left = missing_shards(folder, shards)
    if not left:
        return
    planned = read_plan(folder.plan).shards
    rows = {shard: planned[shard].end - planned[shard].begin for shard in shards}
    total = sum(rows.values())
    done = total - sum(rows[shard] for shard in left)
    shown = ProgressArtifact(f"virnuc-lane-{lane}", f"Lane {lane} on {socket.gethostname()} {device}")

    def tell(event: LaneEvent) -> None:
        nonlocal done
        journal.write(event)
        if isinstance(event, ShardDone):
            done += rows[event.shard]
            shown.update(100 * done / total)

    launcher.run_lane(folder, left, device, lane=lane, num_lanes=num_lanes, on_event=tell)


def end_lane_processes() -> None:
    """Ends every lane of this process, and has none of them tried again."""
    stopping.set()
    launcher.end_lane_processes()
