"""Stages of flows: what is retried, and what ends the run at once."""

import errno
from pathlib import Path

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from tasks import stages
from tasks.stages import find_pending, resumable_task
from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs
from virnuc_core import pipeline
from virnuc_core.errors import InputError, LaneError, StorageError, StorageLostError
from virnuc_core.pipeline import LanesHere, Run
from virnuc_core.settings import RunConfig


@resumable_task
def fail(error: BaseException) -> None:
    raise error


def is_tried_again(error: BaseException) -> bool:
    assert fail.retry_condition_fn is not None
    return bool(fail.retry_condition_fn(fail, TaskRun.model_construct(), Failed(data=error)))


def test_only_what_may_go_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_tried_again(LaneError("the process died"))
    assert not is_tried_again(InputError("no such file"))
    monkeypatch.setattr(stages, "stopping", stages.threading.Event())
    stages.stopping.set()
    assert not is_tried_again(LaneError("the process died"))


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageLostError), (errno.ENOSPC, StorageError)])
def test_an_error_of_the_disk_is_told_in_own_words(number: int, kind: type[StorageError]) -> None:
    with pytest.raises(StorageError) as caught:
        fail.fn(OSError(number, "it failed", "table.tsv"))
    assert type(caught.value) is kind


OWN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path, made_models: MadeModels) -> MadeRun:
    made = plan_run(
        tmp_path / "run", write_contigs(tmp_path / "in.fa", 16), made_models.config(), shard_seconds=0.02
    )
    made.compute([0])
    return made


def leave(run: MadeRun, shard: int) -> Path:
    """Leaves the temporary file of a lane that was killed while writing a shard."""
    left = run.folder.shards / f".{run.folder.shard(shard).name}.{OWN}.tmp"
    left.touch()
    return left


def test_what_killed_lanes_left_of_pending_shards_is_removed(run: MadeRun) -> None:
    of_pending, of_taken = leave(run, 1), leave(run, 2)
    assert find_pending.fn(run.folder, {2}) == tuple(
        shard for shard in range(1, len(run.plan.shards)) if shard != 2
    )
    assert not of_pending.exists()
    assert of_taken.exists(), "another lane may be writing it"


def test_nothing_is_left_of_a_run_that_has_all_shards(run: MadeRun) -> None:
    left = [leave(run, shard) for shard in range(3)]
    run.compute(range(1, len(run.plan.shards)))
    done = Run(run.folder, RunConfig(), "predict", lanes=LanesHere(("cpu",)))
    done.plan = run.plan
    pipeline.validate(done)
    assert not any(path.exists() for path in left)
