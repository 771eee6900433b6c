"""Ends the whole process tree of a run with SIGKILL at random moments, continues the run, and compares its outputs.

    python -m benchmarks.reliability.kills [--number 300]

A run is a process with two lanes, each of which has a process of its own: most are forks, which start at once, every fifth
run has the processes that virnuc starts, and every thirtieth is `virnuc predict` with Prefect and all. A run is killed one to
three times, each time after so many files have appeared in its folder and so much time has passed after that, as was drawn;
then it is left to end. What it leaves must be byte for byte what an undisturbed run leaves, no more and no less.
"""

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from benchmarks.reliability.faults import load_shim
from benchmarks.reliability.laboratory import command_line
from benchmarks.reliability.small_run import final_files, make_material, run
from benchmarks.reports import print_and_write
from virnuc_core.run_folder import RunFolder

Way = Literal["forks", "lanes", "command line"]

_RECORDS: Final = 400
_MOST_SECONDS: Final = 300.0
_NUM_THREADS: Final = 13  # place in /proc/PID/stat after the session
_KEPT_LETTERS: Final = 2000  # of a failed run's output
# Stage of a run by its files; the last match holds.
_STAGES: Final = ("started", "indexing", "planning", "embedding", "aggregating", "writing tables", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """When to kill a run: some seconds after its folder has so many files."""

    files: int
    seconds: float


class Laboratory:
    """Inputs of a run, and the files of an undisturbed one."""

    def __init__(self, scratch: Path) -> None:
        self._made = scratch / "made"
        self._said = scratch / "said"
        self.root: Final = scratch / "run"
        make_material(self._made, _RECORDS)
        # In this process, so that its forks inherit the imports.
        run(self.root, self._made)
        self.expected: Final = final_files(self.root)
        self.num_files: Final = self.count_files()

    def start(self, way: Way) -> ForkProcess:
        """Starts or resumes the run in its own session."""
        process = ForkProcess(target=_lead_session, args=(way, self.root, self._made, self._said))
        process.start()
        while process.is_alive() and os.getpgid(process.pid or 0) != process.pid:
            time.sleep(0.001)
        return process

    def kill(self, kill: Kill, way: Way) -> str | None:
        """Starts the run and kills it; returns its stage, or None when it had ended before."""
        process = self.start(way)
        deadline = time.monotonic() + _MOST_SECONDS
        while self.count_files() < kill.files and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.join(kill.seconds)
        if not process.is_alive():
            return None
        stage = self.stage()
        _kill_tree(process)
        return stage

    def stage(self) -> str:
        """The run's stage."""
        folder = RunFolder(self.root)
        shards = len(list(folder.shards.glob("shard_*.h5"))) if folder.shards.exists() else 0
        whole = sum(name.startswith("shards/") for name in self.expected)
        has = (
            *(True, any(self.root.glob(".frames*")), folder.frames.exists(), folder.plan.exists()),
            *(shards == whole, folder.embeddings.exists(), folder.report.exists()),
        )
        return [name for name, is_so in zip(_STAGES, has, strict=True) if is_so][-1]

    def problem_with_continuing(self, way: Way) -> str:
        """Lets the run end; returns what is wrong with the result, or ""."""
        process = self.start(way)
        process.join(_MOST_SECONDS)
        if process.is_alive():
            _kill_tree(process)
            return f"hangs for {_MOST_SECONDS:.0f} s"
        if process.exitcode:
            return f"ends with {process.exitcode}: {self._said.read_text()[-_KEPT_LETTERS:]}"
        found = final_files(self.root)
        names = sorted({*found, *self.expected})
        return ", ".join(name for name in names if found.get(name) != self.expected.get(name))

    def count_files(self) -> int:
        """Files of the run, including incomplete ones."""
        return sum(len(files) for _, _, files in os.walk(self.root))


def _lead_session(way: Way, root: Path, made: Path, said: Path) -> None:
    """Body of the process that leads a run."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, said.open("wb") as kept:
        for file, descriptor in ((nothing, 0), (kept, 1), (kept, 2)):
            os.dup2(file.fileno(), descriptor)
    if way == "forks":
        run(root, made, lanes=2, forked=True)
    else:
        program = [sys.executable, "-m", "benchmarks.reliability.small_run", str(root), str(made), "2"]
        command = command_line(root, made) if way == "command line" else program
        os.execv(command[0], command)  # noqa: S606 - a program of our own, and no shell


def _kill_tree(leader: ForkProcess) -> None:
    """Kills every process of a session, and waits for the last one."""
    os.killpg(leader.pid or 0, signal.SIGKILL)
    leader.join()
    while any(_session_of(entry) == leader.pid for entry in Path("/proc").iterdir()):
        time.sleep(0.01)


def _session_of(entry: Path) -> int | None:
    """The session of a live process: its files stay open until its last thread has ended."""
    try:
        state, _, _, session, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    is_dead = state == "Z" and int(fields[_NUM_THREADS]) <= 1
    return None if is_dead else int(session)


def measure(laboratory: Laboratory, number: int) -> dict[str, Any]:
    """Kills by stage, runs resumed to identical outputs, and problems."""
    draw = Random(0)
    stages: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    failures = []
    while stages.total() < number:
        shutil.rmtree(laboratory.root, ignore_errors=True)
        way = _way(ways.total())
        ways[way] += 1
        kills: list[str] = []
        for _ in range(draw.randint(1, 3)):
            # A killed process may leave more files than a complete run has.
            files = draw.randint(min(laboratory.count_files(), laboratory.num_files), laboratory.num_files)
            stage = laboratory.kill(Kill(files=files, seconds=draw.random() ** 2 * 0.4), way)
            if stage is None:
                break
            kills.append(stage)
        stages.update(kills)
        if problem := laboratory.problem_with_continuing(way):
            failures.append({"run": ways.total(), "way": way, "killed_while": kills, "problem": problem})
            print(failures[-1], file=sys.stderr, flush=True)
        print(f"{stages.total()} kills, {dict(ways)}: {dict(stages)}", file=sys.stderr, flush=True)
    return {
        "kind": "kills",
        "kills": stages.total(),
        "runs": ways.total(),
        "runs_by_way": dict(ways),
        "identical": ways.total() - len(failures),
        "kills_by_stage": {stage: stages[stage] for stage in _STAGES if stages[stage]},
        "failures": failures,
    }


def _way(number: int) -> Way:
    """How run `number` is started: the slow ways rarely."""
    return "command line" if number % 30 == 29 else "lanes" if number % 5 == 4 else "forks"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=300, help="kills")
    out = Path(__file__).parents[1] / "results" / "reliability" / "kills.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    load_shim("benchmarks.reliability.kills")
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="virnuc-kills-") as scratch:
        report = measure(Laboratory(Path(scratch)), arguments.number)
    print_and_write(report, arguments.out)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
