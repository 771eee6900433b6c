"""A run reprocessed on a GPU with another head or model is byte-identical to a new run there."""

from pathlib import Path

import pytest

from tests.made_models import WIDTH, MadeModels, make_esm2, make_head, make_models, write_contigs
from tests.made_moves import content
from virnuc_core.inference.plan import RunPlan, write_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.worker import run_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    return make_models(tmp_path_factory.mktemp("models"))


def compute(folder: RunFolder, plan: RunPlan) -> None:
    run_shards(folder, range(len(plan.shards)), DEVICE, 0, lambda event: None)


@pytest.mark.parametrize("what", ["head", "ESM-2"])
def test_it_is_the_run_from_nothing(what: str, models: MadeModels, tmp_path: Path) -> None:
    changes: dict[str, RunConfig] = {
        "head": models.config(head=str(make_head(tmp_path / "other.safetensors", 2 * WIDTH, seed=7))),
        "ESM-2": models.config(esm_model=str(make_esm2(tmp_path / "other_esm2"))),
    }
    folder, fresh = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "fresh")
    folder.root.mkdir()
    store = build_frame_store([write_contigs(tmp_path / "in.fa")], folder.frames, 60)
    first = models.config().model_copy(update={"shard_seconds": 1e-4})
    compute(folder, open_plan(first, store, "predict", (DEVICE,), folder))
    folder.next.root.mkdir()
    folder.next.link_frames()
    plan = open_plan(changes[what], store, "predict", (DEVICE,), folder.next)
    fresh.root.mkdir()
    fresh.frames.symlink_to(folder.frames)
    write_plan(fresh.plan, plan)
    assert len(plan.shards) > 1
    for run in (folder.next, fresh):
        compute(run, plan)
    assert content(folder.next) == content(fresh)
