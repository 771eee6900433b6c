"""A small predict run without Prefect: the plain functions of its stages, with two-layer models.

    python -m benchmarks.reliability.small_run FOLDER MATERIAL [LANES]

works like `virnuc predict --out FOLDER` on what `make_material` has left in MATERIAL.
"""

import hashlib
import logging
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.reliability import material
from virnuc_core.errors import LaneError
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.launcher import assign_shards, run_lane
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.inference.shard import pending_shards, remove_shard_temporaries
from virnuc_core.inference.worker import run_shards
from virnuc_core.pipeline import PREDICT, LanesHere, Run, run_stages
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

CONTIGS: Final = "contigs.fa"
# Small enough for several shards.
SHARD_SECONDS: Final = 0.003
# Files with the time and place of a run.
_UNLIKE: Final = ("run.json", "report.html", ".virnuc.lock")


def make_material(folder: Path, records: int) -> None:
    """Models, a head, and contigs of 30 to 400 bases, a few without any stop-free frame."""
    folder.mkdir(parents=True, exist_ok=True)
    material.make_models(folder)
    rng = Random(0)
    with (folder / CONTIGS).open("w") as file:
        for number in range(records):
            sequence = "".join(rng.choices("ACGT", k=rng.choice((30, 60, 150, 400))))
            if number % 7 == 3:
                sequence = "TTAATTAACTAGCTAG" * 12
            file.write(f">contig{number % 37}\n{sequence}\n")


def config_of(made: Path, shard_seconds: float = SHARD_SECONDS) -> RunConfig:
    """Settings for the models of `make_material`."""
    return RunConfig(
        chunk_length=material.CHUNK_LENGTH,
        esm_model=str(made / "esm2"),
        dnabert_model=str(made / "dnabert"),
        head=str(made / "head.safetensors"),
        devices=("cpu",),
        shard_seconds=shard_seconds,
    )


def run(
    root: Path, made: Path, *, lanes: int = 0, forked: bool = False, shard_seconds: float = SHARD_SECONDS
) -> None:
    """Starts or resumes a run.

    Args:
        root: the run's folder.
        made: output of `make_material`.
        lanes: number of lane processes; 0 computes in this one.
        forked: whether these are forks of this process, which start faster, instead of spawned ones.
        shard_seconds: estimated work in a shard.
    """
    config = config_of(made, shard_seconds)
    with open_run_folder(root, force=False) as folder:
        made_run = Run(folder, config, "predict", lanes=_Lanes(lanes, forked), inputs=[str(made / CONTIGS)])
        run_stages(made_run, PREDICT, lambda _: None)


class _Lanes(LanesHere):
    """Lanes as processes, forks or in this process."""

    def __init__(self, lanes: int, forked: bool) -> None:
        super().__init__(("cpu",))
        self._lanes, self._forked = lanes, forked

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards."""
        planned = read_plan(folder.plan)
        pending = pending_shards(folder, planned)
        remove_shard_temporaries(folder, pending)
        return _compute(folder, planned, pending, self._lanes, self._forked)


def _compute(
    folder: RunFolder, planned: RunPlan, pending: tuple[int, ...], lanes: int, forked: bool
) -> list[LaneReport]:
    """Computes the missing shards, as the flow `embed-lane` does."""
    if not pending:
        return []
    if not lanes:
        _compute_here(folder, pending, 0)
        return []
    hands = assign_shards(planned, pending, lanes)
    if forked:
        _compute_in_forks(folder, hands)
        return []

    def work(lane: int) -> LaneReport:
        name = f"lane-{lane:04d}"
        with LaneJournal(folder.lane_journal(name)) as journal, journal.recording_failure(lane):
            return run_lane(
                folder, hands[lane], "cpu", lane=lane, num_lanes=len(hands), on_event=journal.write
            )

    with ThreadPoolExecutor(len(hands)) as threads:
        return list(threads.map(work, range(len(hands))))


def _compute_here(folder: RunFolder, shards: tuple[int, ...], lane: int) -> None:
    with LaneJournal(folder.lane_journal(f"lane-{lane:04d}")) as journal, journal.recording_failure(lane):
        run_shards(folder, shards, "cpu", lane, journal.write)


def _compute_in_forks(folder: RunFolder, hands: tuple[tuple[int, ...], ...]) -> None:
    """Raises LaneError when a fork fails."""
    fork = multiprocessing.get_context("fork")
    forks = [
        fork.Process(target=_compute_here, args=(folder, shards, lane), daemon=True)
        for lane, shards in enumerate(hands)
    ]
    for process in forks:
        process.start()
    for process in forks:
        process.join()
    if any(process.exitcode for process in forks):
        raise LaneError(f"the forks of the lanes ended with {[process.exitcode for process in forks]}.")


def final_files(root: Path) -> dict[str, str]:
    """Digest of every file of a run except those with times, including files that should not be there."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.name not in _UNLIKE
        and path.parent.name != "lanes"
        and ".damaged-" not in path.name
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    run(Path(sys.argv[1]), Path(sys.argv[2]), lanes=int(sys.argv[3]) if len(sys.argv) > 3 else 1)
