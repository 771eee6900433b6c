"""A small predict run with two-layer models and without Prefect, which is started, resumed and compared repeatedly."""

import hashlib
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Final, Literal

from benchmarks.reliability.harness import Forked, Outcome, run_forked
from benchmarks.reliability.samples import CHUNK_LENGTH, make_models
from virnuc_core.errors import LaneError
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.launcher import assign_shards, run_lane
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.resident import ResidentModels
from virnuc_core.inference.runner import LoadedModels
from virnuc_core.inference.shard import pending_shards, remove_shard_temporaries
from virnuc_core.inference.worker import run_shards
from virnuc_core.pipeline import PREDICT, Run, run_stages, translate_os_errors
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

# In one process, with a lane process, with two of them or their forks, which start faster, or `virnuc predict`.
Way = Literal["inline", "lane", "lanes", "forks", "cli"]

CONTIGS: Final = "contigs.fa"
# Small enough for several shards.
SHARD_SECONDS: Final = 0.003
_LANES: Final = {"inline": 0, "lane": 1, "lanes": 2, "forks": 2}
_MOST_SECONDS: Final = {"inline": 60.0, "lane": 120.0, "lanes": 300.0, "forks": 300.0, "cli": 300.0}
# Files with the time and place of a run.
_UNLIKE: Final = ("run.json", "report.html", "virnuc_mqc.json", ".virnuc.lock")


def make_inputs(folder: Path, num_records: int) -> None:
    """Models, a head, and contigs of 30 to 400 bases, a few without any stop-free frame."""
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    rng = Random(0)
    with (folder / CONTIGS).open("w") as file:
        for number in range(num_records):
            sequence = "".join(rng.choices("ACGT", k=rng.choice((30, 60, 150, 400))))
            if number % 7 == 3:
                sequence = "TTAATTAACTAGCTAG" * 12
            file.write(f">contig{number % 37}\n{sequence}\n")


def run(
    root: Path, inputs: Path, *, lanes: int = 0, forked: bool = False, shard_seconds: float = SHARD_SECONDS
) -> None:
    """Starts or resumes a run over the `inputs` of `make_inputs`; without lane processes or their forks in this one."""
    config = RunConfig(
        chunk_length=CHUNK_LENGTH,
        esm_model=str(inputs / "esm2"),
        dnabert_model=str(inputs / "dnabert"),
        head=str(inputs / "head.safetensors"),
        devices=("cpu",),
        shard_seconds=shard_seconds,
    )
    with translate_os_errors(), open_run_folder(root, force=False) as folder:
        run_stages(
            Run(folder, config, "predict", lanes=_Lanes(lanes, forked), inputs=[str(inputs / CONTIGS)]),
            PREDICT,
            lambda _: None,
        )


class _Lanes(ResidentModels):
    """Lanes as processes, forks or in this process, as the flow `embed-lane` runs them."""

    def __init__(self, lanes: int, forked: bool) -> None:
        super().__init__(("cpu",))
        self._lanes, self._forked = lanes, forked

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards."""
        plan = read_plan(folder.plan)
        pending = pending_shards(folder, plan)
        remove_shard_temporaries(folder, pending)
        if not pending:
            return []
        if not self._lanes:
            _compute_here(folder, pending, 0)
            return []
        hands = assign_shards(plan, pending, self._lanes)
        if self._forked:
            _compute_in_forks(folder, hands)
            return []

        def work(lane: int) -> LaneReport:
            with (
                LaneJournal(folder.lane_journal(f"lane-{lane:04d}")) as journal,
                journal.recording_failure(lane),
            ):
                return run_lane(
                    folder, hands[lane], "cpu", lane=lane, num_lanes=len(hands), on_event=journal.write
                )

        with ThreadPoolExecutor(len(hands)) as threads:
            return list(threads.map(work, range(len(hands))))


def _compute_here(folder: RunFolder, shards: tuple[int, ...], lane: int) -> None:
    with LaneJournal(folder.lane_journal(f"lane-{lane:04d}")) as journal, journal.recording_failure(lane):
        run_shards(folder, shards, LoadedModels("cpu"), lane, journal.write)


def _compute_in_forks(folder: RunFolder, hands: tuple[tuple[int, ...], ...]) -> None:
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


class SmallRun:
    """A run that is disturbed and resumed; `expected` are the `final_files` of an undisturbed one."""

    def __init__(self, scratch: Path, num_records: int = 40) -> None:
        self.root: Final = scratch / "run"
        self._inputs = scratch / "inputs"
        make_inputs(self._inputs, num_records)
        # In this process, so that its forks inherit the imports.
        run(self.root, self._inputs)
        self.expected: Final = final_files(self.root)
        self.num_files: Final = self.count_files()

    def clear(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    def start(self, way: Way) -> Forked:
        """Starts or resumes it."""
        return Forked(lambda: self._work(way))

    def run(self, way: Way = "inline") -> Outcome:
        """Runs it to its end."""
        return run_forked(lambda: self._work(way), _MOST_SECONDS[way])

    def count_files(self) -> int:
        """Files of the run, including incomplete ones."""
        return sum(len(files) for _, _, files in os.walk(self.root))

    def difference(self) -> str:
        """Names of the files that differ from those of an undisturbed run; "" if none does."""
        found = final_files(self.root)
        names = sorted({*found, *self.expected})
        return ", ".join(name for name in names if found.get(name) != self.expected.get(name))

    def problem_with_resuming(self, way: Way = "inline") -> str:
        """Resumes it; returns what is wrong with the result, or ""."""
        outcome = self.run(way)
        if outcome.ending != "completed":
            return f"is not resumed: {outcome}"
        difference = self.difference()
        return f"is resumed to other outputs: {difference}" if difference else ""

    def _work(self, way: Way) -> None:
        if way != "cli":
            run(self.root, self._inputs, lanes=_LANES[way], forked=way == "forks")
            return
        settings = {
            "--out": self.root,
            "--chunk-length": CHUNK_LENGTH,
            "--esm-model": self._inputs / "esm2",
            "--dnabert-model": self._inputs / "dnabert",
            "--head": self._inputs / "head.safetensors",
            "--devices": "cpu",
            "--shard-seconds": SHARD_SECONDS,
        }
        flags = [str(word) for pair in settings.items() for word in pair]
        command = [sys.executable, "-m", "virnuc_cli", "predict", str(self._inputs / CONTIGS), *flags]
        os.execv(command[0], command)  # noqa: S606 - a program of our own, and no shell
