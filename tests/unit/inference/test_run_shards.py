"""One lane's work in this process: errors of its threads, and a run that is started over meanwhile."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError, DeviceError, MismatchError
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.plan import RunPlan, read_plan, write_plan
from virnuc_core.inference.runner import LoadedModels, run_shards
from virnuc_core.inference.shard import pending_shards
from virnuc_core.results.run_opening import open_run_folder

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> MadeRun:
    """A run of at least four shards, none computed."""
    run = plan_run(tmp_path / "run", contigs, made_models.config(), shard_seconds=0.04)
    assert len(run.plan.shards) >= 4
    return run


def shard_names(run: MadeRun) -> list[str]:
    return sorted(path.name for path in run.folder.shards.iterdir() if path.is_file())


def test_models_that_cannot_be_loaded_are_an_error_of_the_lane(
    run: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    encode = Esm2Tokenizer.encode

    def encode_and_tell(self: Esm2Tokenizer, proteins: ByteColumn) -> TokenColumn:
        begun.set()
        return encode(self, proteins)

    def fail(models: LoadedModels, plan: RunPlan) -> None:
        assert begun.wait(10), "nothing is prepared while models load"
        raise CheckpointError("broken")

    monkeypatch.setattr(Esm2Tokenizer, "encode", encode_and_tell)
    monkeypatch.setattr(LoadedModels, "load", fail)
    with pytest.raises(CheckpointError, match="broken"):
        run.compute()
    assert shard_names(run) == []


@pytest.mark.parametrize("settings", [{"repr_layer": 1}, {}], ids=["other settings", "the same settings"])
def test_a_lane_writes_nothing_into_the_folder_of_another_run(
    run: MadeRun, contigs: Path, made_models: MadeModels, settings: dict[str, int]
) -> None:
    """The run is started over while an old lane of a pool, which nobody has stopped, is running."""

    def start_over(event: LaneEvent) -> None:
        if isinstance(event, ShardDone) and event.shard == 0:
            with open_run_folder(run.folder.root, force=True):
                plan_run(run.folder.root, contigs, made_models.config(**settings), shard_seconds=0.04)
            run.folder.shards.mkdir()

    indices = range(len(run.plan.shards))
    if settings:
        with pytest.raises(MismatchError, match=r"was started over \(--force\) .* shard 1 is not written"):
            run_shards(run.folder, indices, LoadedModels("cpu"), 0, start_over)
        assert list(run.folder.shards.iterdir()) == []
    else:
        run_shards(run.folder, indices, LoadedModels("cpu"), 0, start_over)
        assert pending_shards(run.folder, read_plan(run.folder.plan)) == (0,)


def test_attention_that_cannot_run_here_is_an_error_of_its_own(run: MadeRun) -> None:
    """The plan may come from a machine with other packages or GPUs."""
    models = tuple(replace(model, attention="triton", precision="bf16") for model in run.plan.models)
    write_plan(run.folder.plan, replace(run.plan, models=models))
    with pytest.raises(DeviceError, match="--attention triton needs a CUDA device"):
        run.compute()
