"""`virnuc clean`: what it removes, what it keeps, and what is possible afterwards."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core.results.run_opening import LOCK_NAME, open_next
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("prefect_server", "small_shards")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_stay_and_the_rest_can_be_computed_again(
    virnuc: CommandLine, run: Path, contigs: Path, models: MadeModels, tmp_path: Path
) -> None:
    before = contents(run)
    (run / "shards" / "mine.txt").write_text("not virnuc's")
    plan = virnuc.done("clean", tmp_path, "--older-than", "0h", "--dry-run", "--json").document
    assert (plan["dry_run"], contents(run).keys() - {"shards/mine.txt"}) == (True, before.keys())
    assert virnuc.done("clean", tmp_path, "--older-than", "1d", "--json").document["removed"] == []
    done = virnuc.done("clean", tmp_path, "--older-than", "0h", "--json").document
    assert done["removed"] == plan["removed"] == [{"path": str(run), "bytes": done["bytes"]}]
    after = contents(run)
    gone = before.keys() - after.keys()
    assert sum(len(before[name]) for name in gone) == done["bytes"]
    assert {name.partition("/")[0] for name in gone} == {"frames", "shards"}
    assert "shards/mine.txt" in after
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == {"run.json"}
    assert virnuc.done("clean", tmp_path, "--older-than", "0h", "--json").document["removed"] == []

    assert "`virnuc clean` removed them" in virnuc.done("fsck", run).out
    virnuc.done("report", run)
    virnuc.refused(2, "`virnuc clean` removed them", "reprocess", run, "--head", models.head)
    again = virnuc.done("predict", contigs, "--out", run, *models.flags)
    assert "all of it is computed again" in again.err
    assert (run / "embeddings.h5").read_bytes() == before["embeddings.h5"]
    assert virnuc.done("fsck", run, "--json").document["whole"]


def test_what_is_kept(virnuc: CommandLine, run: Path, tmp_path: Path) -> None:
    def kept() -> tuple[str, bool]:
        document = virnuc.done("clean", tmp_path, "--older-than", "0h", "--json").document
        assert document["removed"] == []
        [one] = document["kept"]
        return one["reason"], (run / "frames").is_dir()

    with (run / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason, is_there = kept()
        assert reason.startswith(f"another run works in {run}")
        assert is_there
    open_next(RunFolder(run), force=False)
    assert kept() == ("being reprocessed", True)
    shutil.rmtree(run / "next")
    (run / "contigs.tsv").rename(tmp_path / "contigs.tsv")
    assert kept() == (f"{run / 'contigs.tsv'} is not as it was when the run finished", True)
    (run / "run.json").write_text("{")
    reason, is_there = kept()
    assert reason.startswith(f"{run / 'run.json'} cannot be read")
    (run / "run.json").unlink()
    assert kept() == ("not finished", True)
    virnuc.refused(3, "nowhere is no folder", "clean", "nowhere", "--older-than", "0h")
    virnuc.refused(2, "--older-than 3 days is not understood", "clean", "--older-than", "3 days")


def test_caches_of_the_home_folder(
    virnuc: CommandLine, tmp_path: Path, set_env: Callable[..., None], run: Path
) -> None:
    home = tmp_path / "home"
    files = {
        name: home / name
        for name in (
            "up/worker.log",
            "staging/inputs/1/a.fa",
            "mlflow.db",
        )
    }
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content")
        os.utime(file, (time.time() - 86_400,) * 2)
    new = home / "staging" / "inputs" / "2" / "b.fa"
    new.parent.mkdir()
    new.touch()
    staged = shutil.move(run, home / "staging" / "outputs" / "2" / "run")
    set_env(VIRNUC_HOME=home)
    with (home / "up" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.name, (time.time() - 86_400,) * 2)
        document = virnuc.done("clean", "--older-than", "3h", "--json").document
    assert document["kept"] == [{"path": str(home / "up"), "reason": "in use"}]
    assert {name for name, file in files.items() if file.exists()} == {"up/worker.log", "mlflow.db"}
    assert new.exists()
    removed = virnuc.done("clean", "--older-than", "0h", "--json").document["removed"]
    assert {Path(one["path"]) for one in removed} >= {home / "up", Path(staged)}
    assert not (Path(staged) / "shards").exists()
    assert (Path(staged) / "embeddings.h5").exists()
