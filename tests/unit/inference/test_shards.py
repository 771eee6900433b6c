"""What is on the disk is kept when it is whole and of this run, and computed again when not."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.shards import (
    identity_of,
    iter_shard_results,
    missing_shards,
    pending_shards,
    require_all_shards,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.shard_file import read_shard


@pytest.fixture
def run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> MadeRun:
    made = plan_run(tmp_path / "run", contigs, made_models.config())
    made.compute([0, 2])
    return made


def test_missing_shards_are_pending(run: MadeRun) -> None:
    assert pending_shards(run.folder, run.plan) == (1, *range(3, len(run.plan.shards)))
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is missing: run the same command again"):
        require_all_shards(run.folder, run.plan)
    assert missing_shards(run.folder, (0, 1, 2, 4)) == (1, 4)


def test_without_a_folder_all_shards_are_missing(tmp_path: Path) -> None:
    assert missing_shards(RunFolder(tmp_path), (3, 1)) == (3, 1)


def test_a_damaged_shard_is_set_aside_and_comes_out_the_same(
    run: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    path = run.folder.shard(2)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with caplog.at_level(logging.WARNING):
        assert 2 in pending_shards(run.folder, run.plan)
    assert "Set aside as shard_00002.h5.damaged-1" in caplog.text
    assert not path.exists()
    run.compute([2])
    assert path.read_bytes() == content


def test_a_foreign_shard_is_set_aside(
    run: MadeRun, tmp_path: Path, contigs: Path, made_models: MadeModels
) -> None:
    other = plan_run(tmp_path / "other", contigs, made_models.config(token_budget=99))
    other.compute([0])
    shutil.copy(other.folder.shard(0), run.folder.shard(0))
    with pytest.raises(MismatchError, match="shard_00000"):
        read_shard(run.folder.shard(0), identity_of(run.plan, run.plan.shards[0]))
    assert 0 in pending_shards(run.folder, run.plan)
    assert run.folder.shard(0).with_name("shard_00000.h5.damaged-1").exists()


def test_a_finished_run_has_all(finished_run: MadeRun) -> None:
    require_all_shards(finished_run.folder, finished_run.plan)
    assert pending_shards(finished_run.folder, finished_run.plan) == ()
    rows = [shard.begin for shard, _ in iter_shard_results(finished_run.folder, finished_run.plan)]
    assert rows == [shard.begin for shard in finished_run.plan.shards]
