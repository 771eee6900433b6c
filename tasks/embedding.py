"""The shards of a run: which are missing, and one lane's share of them."""

import multiprocessing

from tasks.progress import LaneProgress, current_progress
from tasks.stage import stage, stopping
from virnuc_core.inference.events import LaneEvent, LaneReport, ShardDone
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.shards import pending_shards
from virnuc_core.run_plan import RunFolder, read_plan


@stage
def find_pending(folder: RunFolder) -> tuple[int, ...]:
    """The shards that are not on the disk, or not whole; the latter are set aside."""
    stopping.clear()
    return pending_shards(folder, read_plan(folder.plan))


@stage
def compute_shards(
    folder: RunFolder, shards: tuple[int, ...], device: str, lane: int, num_lanes: int
) -> LaneReport:
    """Computes shards in a process of their own; called again, it leaves out those that are there by then.

    Raises:
        LaneError: the process died.
        VirnucError: what the process raised.
    """
    plan = read_plan(folder.plan)
    left = tuple(shard for shard in shards if not folder.shard(shard).exists())
    rows = {shard: plan.shards[shard].end - plan.shards[shard].begin for shard in left}
    total, done = sum(rows.values()), 0
    progress = current_progress()

    def tell(event: LaneEvent | None) -> None:
        nonlocal done
        if isinstance(event, ShardDone):
            done += rows[event.shard]
        progress.lane(LaneProgress(lane=lane, device=device, rows_done=done, rows_total=total))

    tell(None)
    return run_lane(folder, left, device, lane=lane, num_lanes=num_lanes, on_event=tell)


def end_lane_processes() -> None:
    """Ends every lane of this process, so that whoever waits for one goes on with its LaneError."""
    stopping.set()
    for process in multiprocessing.active_children():
        if process.name.startswith("virnuc-lane"):
            process.terminate()
