"""A run reprocessed on a GPU with another head or model is byte-identical to a new run there."""

from pathlib import Path

import pytest

from tests.made_models import WIDTH, make_esm2, make_head, make_models, plan_run, write_contigs
from tests.made_moves import begin_move, content, from_nothing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("what", ["head", "ESM-2"])
def test_it_is_the_run_from_nothing(what: str, tmp_path: Path) -> None:
    models = make_models(tmp_path)
    changes = {
        "head": models.config(head=str(make_head(tmp_path / "other.safetensors", 2 * WIDTH, seed=7))),
        "ESM-2": models.config(esm_model=str(make_esm2(tmp_path / "other_esm2"))),
    }
    fasta = write_contigs(tmp_path / "in.fa")
    run = plan_run(tmp_path / "run", fasta, models.config(), shard_seconds=1e-4, device="cuda:0")
    run.compute()
    following = begin_move(run, changes[what])
    assert len(following.plan.shards) > 1
    following.compute()
    assert content(following.folder) == content(from_nothing(following, tmp_path / "fresh").folder)
