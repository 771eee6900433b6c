"""SIGKILL before every single file-system change while a reprocessed run replaces the old one."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made_models import WIDTH, MadeModels, MadeRun, make_head, plan_run, write_contigs
from tests.made_moves import begin_move, content, write_results
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder

# Forks a child per input line.
MOVER = """
import os, signal, sys
from pathlib import Path
from virnuc_core.results.run_opening import open_run_folder, put_in_place
from virnuc_core.run_folder import RunFolder

def work(what, root):
    if what == "move":
        put_in_place(RunFolder(root))
    else:
        with open_run_folder(root, force=False):
            pass

for line in sys.stdin:
    what, left, root = line.split(maxsplit=2)
    left = int(left)
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        print("done" if status == 0 else "killed" if os.WIFSIGNALED(status) else "failed", flush=True)
        continue

    def count(event, arguments):
        global left
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
    try:
        work(what, Path(root.strip()))
    except BaseException:
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, models: MadeModels) -> MadeRun:
    """A finished run with a complete successor beside it; tests work on copies."""
    folder = tmp_path_factory.mktemp("run")
    contigs = write_contigs(folder / "in.fa", 16)
    made = plan_run(folder / "run", contigs, models.config(), shard_seconds=0.02)
    other = make_head(folder / "other.safetensors", 2 * WIDTH, seed=7)
    made.compute()
    write_results(made)
    made.folder.report.write_text("{}")
    made.folder.multiqc.write_text("{}")
    made.folder.page.write_text("<!DOCTYPE html>")
    moved = begin_move(made, models.config(head=str(other)))
    moved.compute()
    write_results(moved)
    for number, folder_of in enumerate((made.folder, moved.folder)):
        folder_of.lanes.mkdir()
        folder_of.lane_journal(f"lane-0000-{number}").write_text("{}\n")
    return made


def copy_of(both: MadeRun, root: Path) -> RunFolder:
    shutil.copytree(both.folder.root, root, symlinks=True)
    return RunFolder(root)


class Mover:
    """Moves runs in child processes, which are killed before one of their file changes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MOVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def is_killed(self, folder: RunFolder, what: str, after: int) -> bool:
        """Whether it was killed after `after` changes, before it was done.

        `what` is "move" (replace a run by its successor) or "open" (what the next command does).
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, after, folder.root, file=self._process.stdin, flush=True)
        return {"killed": True, "done": False}[self._process.stdout.readline().strip()]

    def stop(self) -> None:
        self._process.communicate(timeout=20)


@pytest.fixture(scope="module")
def mover() -> Iterator[Mover]:
    mover = Mover()
    yield mover
    mover.stop()


def test_at_every_step_the_next_command_goes_on(both: MadeRun, mover: Mover, tmp_path: Path) -> None:
    old, new = content(both.folder), content(both.folder.next)
    assert old.keys() - {path.name for path in both.folder.timed} == new.keys()
    steps = 0
    while True:
        folder = copy_of(both, tmp_path / f"run_{steps}")
        if not mover.is_killed(folder, "move", steps):
            break
        if folder.next.root.exists():
            assert content(folder) == old, "the old run is whole until all is decided"
            assert content(folder.next) == new
        else:
            with open_run_folder(folder.root, force=False):
                pass
            assert content(folder) == new
            assert not folder.incoming.root.exists()
            assert len(list(folder.lanes.iterdir())) == 2
        steps += 1
    assert content(folder) == new
    assert steps > len(new)


def test_killed_again_and_again_it_arrives_and_starting_over_throws_both_away(
    both: MadeRun, mover: Mover, tmp_path: Path
) -> None:
    folder = copy_of(both, tmp_path / "run")
    assert mover.is_killed(folder, "move", 2)
    times = 0
    while mover.is_killed(folder, "open", 6):
        times += 1
        assert times < 50
    assert times > 3
    assert content(folder) == content(both.folder.next)

    for number, after in enumerate((0, 5)):
        folder = copy_of(both, tmp_path / f"run_{number}")
        assert mover.is_killed(folder, "move", after)
        (folder.root / "mine.txt").touch()
        with open_run_folder(folder.root, force=True):
            names = {path.name for path in folder.root.iterdir()}
        assert names == {"mine.txt", ".virnuc.lock"}
