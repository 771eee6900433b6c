"""Ends the whole process tree of a run with SIGKILL at random moments, resumes the run, and compares its outputs.

    python -m benchmarks.reliability.kills [--number 300]

A run is a process with two lanes, each of which has a process of its own: most are forks, which start at once, every fifth
run has the processes that virnuc starts, and every thirtieth is `virnuc predict` with Prefect and all. A run is killed one to
three times, each time after so many files have appeared in its folder and so much time has passed after that, as was drawn;
then it is left to end. What it leaves must be byte for byte what an undisturbed run leaves, no more and no less.
"""

import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.reliability.harness import main, program, say
from benchmarks.reliability.small_run import SmallRun, Way
from virnuc_core.run_folder import RunFolder

_RECORDS: Final = 400
_MOST_SECONDS: Final = 300.0
# Stage of a run by its files; the last match holds.
_STAGES: Final = ("started", "indexing", "planning", "embedding", "aggregating", "writing tables", "ended")


def stage_of(run: SmallRun) -> str:
    """The stage of an incomplete run."""
    folder = RunFolder(run.root)
    shards = len(list(folder.shards.glob("shard_*.h5"))) if folder.shards.exists() else 0
    has = (
        *(True, any(run.root.glob(".frames*")), folder.frames.exists(), folder.plan.exists()),
        *(shards == sum(name.startswith("shards/") for name in run.expected), folder.embeddings.exists()),
        folder.report.exists(),
    )
    return [name for name, is_so in zip(_STAGES, has, strict=True) if is_so][-1]


def killed(run: SmallRun, way: Way, files: int, seconds: float) -> str | None:
    """Starts the run and kills it some seconds after it has so many files; its stage then, None if it had ended."""
    process = run.start(way)
    deadline = time.monotonic() + _MOST_SECONDS
    while run.count_files() < files and time.monotonic() < deadline:
        if process.wait(0.001):
            return None
    if process.wait(seconds):
        return None
    stage = stage_of(run)
    process.kill()
    return stage


def measure(scratch: Path, number: int) -> dict[str, Any]:
    """Kills by stage, runs resumed to identical outputs, and problems."""
    run = SmallRun(scratch, _RECORDS)
    draw = Random(0)
    stages: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    failures = []
    while stages.total() < number:
        run.clear()
        done = ways.total()
        way: Way = "cli" if done % 30 == 29 else "lanes" if done % 5 == 4 else "forks"
        ways[way] += 1
        kills: list[str] = []
        for _ in range(draw.randint(1, 3)):
            # A killed process may leave more files than a complete run has.
            files = draw.randint(min(run.count_files(), run.num_files), run.num_files)
            stage = killed(run, way, files, draw.random() ** 2 * 0.4)
            if stage is None:
                break
            kills.append(stage)
        stages.update(kills)
        if problem := run.problem_with_resuming(way):
            failures.append({"run": done, "way": way, "killed_while": kills, "problem": problem})
            say(failures[-1])
        say(f"{stages.total()} kills, {dict(ways)}: {dict(stages)}")
    return {
        "kills": stages.total(),
        "runs": ways.total(),
        "runs_by_way": dict(ways),
        "identical": ways.total() - len(failures),
        "kills_by_stage": {stage: stages[stage] for stage in _STAGES if stages[stage]},
        "failures": failures,
    }


if __name__ == "__main__":
    parser = program(__doc__, "kills")
    parser.add_argument("--number", type=int, default=300, help="kills")
    main(parser, measure)
