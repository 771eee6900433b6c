"""Copied and reprocessed runs, and the new runs that they must equal."""

import shutil
from pathlib import Path

from tests.made_models import MadeRun
from virnuc_core.inference.plan import write_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.contig_scores import contig_head_of
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig


def copy_of(run: MadeRun, root: Path) -> MadeRun:
    """A run that a test may change."""
    folder = RunFolder(shutil.copytree(run.folder.root, root))
    return MadeRun(folder, FrameStore.open(folder.frames), run.plan, run.device)


def begin_move(run: MadeRun, config: RunConfig) -> MadeRun:
    """Plans the successor of a run, beside it."""
    following = run.folder.next
    following.root.mkdir()
    following.link_frames()
    plan = open_plan(config, run.store, "predict", (run.device,), following)
    return MadeRun(following, run.store, plan, run.device)


def from_nothing(run: MadeRun, root: Path) -> MadeRun:
    """A run of the same plan that reuses nothing."""
    folder = RunFolder(root)
    root.mkdir()
    folder.frames.symlink_to(run.folder.frames.resolve())
    write_plan(folder.plan, run.plan)
    fresh = MadeRun(folder, run.store, run.plan, run.device)
    fresh.compute()
    return fresh


def write_results(run: MadeRun) -> None:
    """All files of a computed run except its report."""
    aggregate(run.folder, run.plan, run.store)
    write_tables(run.folder, run.store, head=contig_head_of(run.plan))


def content(folder: RunFolder) -> dict[str, bytes]:
    """Bytes of the plan, the shards and the results."""
    files = [folder.plan, *folder.shards.iterdir(), *(path for path in folder.results if path.exists())]
    return {str(path.relative_to(folder.root)): path.read_bytes() for path in files}
