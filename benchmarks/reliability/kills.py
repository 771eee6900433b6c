"""Ends the whole process tree of a run with SIGKILL at random moments, resumes the run, and compares its outputs.

    python -m benchmarks.reliability.kills [--number 300]

Most runs are forks, which start at once; every tenth is `virnuc predict`. A run is killed one to three times, each time after
so many files have appeared in its folder and so much time has passed after that, as was drawn; then it is left to end. What it
leaves must be byte for byte what an undisturbed run leaves, no more and no less.
"""

import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.reliability.harness import Forked, SmallRun, main, say
from benchmarks.reports import options_of
from virnuc_core.run_folder import RunFolder

_MOST_SECONDS: Final = 300.0
# Stage of a run by its files; the last match holds.
_STAGES: Final = ("started", "planning", "embedding", "writing tables", "ended")


def stage_of(root: Path) -> str:
    folder = RunFolder(root)
    files = (root, folder.frames, folder.plan, folder.embeddings, folder.report)
    return [name for name, file in zip(_STAGES, files, strict=True) if file.exists() or file == root][-1]


def killed(run: SmallRun, way: str, files: int, seconds: float) -> str | None:
    """Starts the run and kills it some seconds after it has so many files; its stage then, None if it had ended."""
    process = Forked(run.work_as_command if way == "command" else run.work)
    deadline = time.monotonic() + _MOST_SECONDS
    while run.count_files() < files and time.monotonic() < deadline:
        if process.wait(0.001):
            return None
    if process.wait(seconds):
        return None
    stage = stage_of(run.root)
    process.kill()
    return stage


def measure(scratch: Path, number: int) -> dict[str, Any]:
    run = SmallRun(scratch, 60)
    draw = Random(0)
    stages: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    failures = []
    while stages.total() < number:
        run.clear()
        done = ways.total()
        way = "command" if done % 10 == 9 else "fork"
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
        if problem := run.problem_with_resuming():
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
    parser = options_of("reliability.kills", __doc__)
    parser.add_argument("--number", type=int, default=300, help="kills")
    main(parser, measure)
