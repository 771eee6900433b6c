"""SIGKILL during a run; after resuming, every file is byte-identical to that of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import LaneError
from virnuc_core.files import temporary_name
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.lane_process import LaneProcess
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.shard import remove_shard_temporaries
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.tables import write_tables

# Runs a lane and reports finished shards, so that its parent can kill it.
PARENT = """
import sys
from pathlib import Path
from virnuc_core.inference.events import LaneStarted
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.run_folder import RunFolder

def tell(event):
    print(event.pid if isinstance(event, LaneStarted) else type(event).__name__, flush=True)

LocalLanes(("cpu",), tell, in_processes=True).compute(RunFolder(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, models: MadeModels, contigs: Path) -> dict[str, bytes]:
    """Files of an undisturbed run."""
    run = plan_run(tmp_path_factory.mktemp("undisturbed"), contigs, models.config(), shard_seconds=0.02)
    return finish(run)


def finish(run: MadeRun) -> dict[str, bytes]:
    """Resumes the run like a second call of the command; returns the bytes of every file."""
    LocalLanes(("cpu",), in_processes=True).compute(run.folder)
    remove_shard_temporaries(run.folder, range(len(run.plan.shards)))
    aggregate(run.folder, run.plan, run.store)
    write_tables(run.folder, run.store, run.head, run.plan.calls)
    files = [path for path in run.folder.root.rglob("*") if path.is_file() and "damaged" not in path.name]
    return {str(path.relative_to(run.folder.root)): path.read_bytes() for path in files}


def is_gone(pid: int) -> bool:
    """Whether a process has ended; zombies count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    "shards_before", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(5, marks=pytest.mark.slow)]
)
def test_kill_the_lane(run: MadeRun, expected: dict[str, bytes], shards_before: int) -> None:
    done: list[int] = []

    def kill(event: LaneEvent) -> None:
        if isinstance(event, ShardDone):
            done.append(event.shard)
        if len(done) == shards_before:
            lane.kill()

    with LaneProcess("cpu") as lane, pytest.raises(LaneError, match="was ended by SIGKILL") as caught:
        lane.run(run.folder, range(len(run.plan.shards)), 0, kill)
    assert caught.value.retryable
    kept = {index for index in done if run.folder.shard(index).exists()}
    assert kept == set(done)
    times = {index: run.folder.shard(index).stat().st_mtime_ns for index in kept}
    # What a kill in the middle of writing leaves.
    run.folder.shards.mkdir(exist_ok=True)
    finals = (run.folder.embeddings, run.folder.contigs, run.folder.chunks)
    for path in (run.folder.shard(shards_before), *finals):
        temporary_name(path).write_bytes(b"half a file")
    assert finish(run) == expected
    assert times == {index: run.folder.shard(index).stat().st_mtime_ns for index in kept}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_kill_the_parent(
    run: MadeRun, expected: dict[str, bytes], tmp_path: Path, how: signal.Signals
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(run.folder.root)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lane, *_ = [parent.stdout.readline() for _ in range(3)]
        parent.send_signal(how)
    deadline = time.monotonic() + 20
    while not is_gone(int(lane)):
        assert time.monotonic() < deadline, "the lane outlived its parent"
        time.sleep(0.05)
    assert finish(run) == expected
