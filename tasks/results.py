"""From finished shards to the files that a person opens."""

from pathlib import Path

from tasks.stage import stage
from virnuc_core.inference.shard import ShardCounters, remove_shard_temporaries, require_all_shards
from virnuc_core.results.aggregate import aggregate as merge_shards
from virnuc_core.results.tables import TableCounts, write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import read_plan
from virnuc_core.sequences.frame_store import FrameStore


@stage
def validate(folder: RunFolder) -> None:
    """Makes sure that every shard of the plan is there, and removes what killed lanes have left; merging them checks their content.

    Raises:
        DamagedFileError: one is not; the same command computes it.
    """
    plan = read_plan(folder.plan)
    require_all_shards(folder, plan)
    remove_shard_temporaries(folder, range(len(plan.shards)))


@stage
def aggregate(folder: RunFolder, out: Path) -> ShardCounters:
    """Checks the shards and merges them into one file in input order; gives the work of all of them together."""
    return merge_shards(folder, read_plan(folder.plan), FrameStore.open(folder.frames), out)


@stage
def classify(folder: RunFolder) -> TableCounts:
    """Calls chunks and contigs from the scores of their frames, and writes the tables."""
    return write_tables(folder, FrameStore.open(folder.frames), read_plan(folder.plan).threshold)
