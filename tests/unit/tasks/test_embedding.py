from pathlib import Path

import pytest

from tasks.embedding import find_pending
from tasks.results import validate
from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs

OWN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path, made_models: MadeModels) -> MadeRun:
    made = plan_run(
        tmp_path / "run", write_contigs(tmp_path / "in.fa", 16), made_models.config(), shard_seconds=0.02
    )
    made.compute([0])
    return made


def leave(run: MadeRun, shard: int) -> Path:
    """What a lane that was killed while it wrote a shard leaves."""
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
    validate.fn(run.folder)
    assert not any(path.exists() for path in left)
