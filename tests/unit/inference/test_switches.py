"""Emergency switches: they travel with a run, and rescue one in progress."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs
from tests.made_moves import begin_move, content, copy_of, from_nothing, write_results
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import make_plan, open_plan
from virnuc_core.inference.reuse import ReusedShards
from virnuc_core.inference.shard import pending_shards
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.run_opening import drop_next
from virnuc_core.settings import RunConfig

PADDED = ("VIRNUC_DISABLE_PACKING",)
REFERENCE = ("VIRNUC_V1_ATTENTION",)


@pytest.fixture(scope="module")
def begun(made_models: MadeModels, tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """A run of at least five shards, the first two computed."""
    folder = tmp_path_factory.mktemp("begun")
    contigs = write_contigs(folder / "in.fa", 16)
    made = plan_run(folder / "run", contigs, made_models.config(switches=()), shard_seconds=0.012)
    assert len(made.plan.shards) >= 5
    made.compute([0, 1])
    return made


@pytest.fixture
def run(begun: MadeRun, tmp_path: Path) -> MadeRun:
    return copy_of(begun, tmp_path / "run")


def resume(run: MadeRun, config: RunConfig) -> MadeRun:
    """Plans the run again with other settings."""
    return replace(run, plan=open_plan(config, run.store, "predict", ("cpu",), run.folder))


def attention(run: MadeRun) -> list[str]:
    """Attention backend of the protein model in each shard."""
    return [run.plan.for_shard(shard.index).models[1].attention for shard in run.plan.shards]


def shard_bytes(run: MadeRun) -> list[bytes]:
    return [run.folder.shard(shard.index).read_bytes() for shard in run.plan.shards]


def test_those_of_the_plan_win_over_the_environment_of_who_plans(
    begun: MadeRun, made_models: MadeModels, set_env: Callable[..., None]
) -> None:
    """A worker plans only with the switches of the run's submitter."""

    def planned(**changes: object) -> set[str]:
        plan = make_plan(made_models.config(**changes), begun.store, "predict", ("cpu",))
        return {model.attention for model in plan.models}

    assert planned(switches=PADDED) == {"padded"}
    set_env(VIRNUC_DISABLE_PACKING=1)
    assert planned() == {"padded"}
    assert planned(switches=REFERENCE) == {"reference"}
    assert planned(switches=()) == {"sdpa"}


def test_missing_shards_compute_with_the_switch(
    run: MadeRun, made_models: MadeModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [run.folder.shard(index).read_bytes() for index in (0, 1)]
    with caplog.at_level(logging.WARNING):
        rescued = resume(run, made_models.config(switches=PADDED))
    missing = len(run.plan.shards) - 2
    assert f"(VIRNUC_DISABLE_PACKING): {missing} of {len(run.plan.shards)} shards are missing" in caplog.text
    assert attention(rescued) == ["sdpa"] * 2 + ["padded"] * missing
    assert rescued.plan == read_plan(run.folder.plan)
    assert rescued.plan.fingerprint != run.plan.fingerprint
    assert pending_shards(rescued.folder, rescued.plan) == tuple(range(2, len(run.plan.shards)))
    run.folder.shard(1).unlink()  # computed again with its original arithmetic
    rescued.compute(range(1, len(run.plan.shards)))
    assert pending_shards(run.folder, rescued.plan) == ()

    padded = from_nothing(replace(rescued, plan=rescued.plan.for_shard(2)), tmp_path / "padded")
    assert shard_bytes(rescued)[:2] == kept
    assert shard_bytes(rescued)[2:] == shard_bytes(padded)[2:]
    write_results(rescued)
    [problem] = inspect_path(rescued.folder.root).problems
    assert "run.json is missing" in problem  # written only by flows

    with caplog.at_level(logging.WARNING):
        resume(rescued, made_models.config(switches=REFERENCE))
    assert "(VIRNUC_V1_ATTENTION) stay as they are" in caplog.text
    assert read_plan(run.folder.plan) == rescued.plan

    # Reprocessing makes all shards alike.
    for switches, kept_shards in (((), {0, 1}), (PADDED, set(range(2, len(run.plan.shards))))):
        moved = begin_move(rescued, made_models.config(switches=switches))
        reused = ReusedShards.open(moved.folder, moved.plan)
        assert reused is not None
        assert reused.families == {"dnabert_s", "esm2"}
        assert {s.index for s in moved.plan.shards if reused.read(s)} == kept_shards
        moved.compute()
        fresh = from_nothing(moved, tmp_path / f"fresh{len(switches)}")
        assert content(moved.folder) == content(fresh.folder)
        drop_next(rescued.folder)


def test_each_shard_computes_with_the_switches_that_were_set_when_it_was_missing(
    run: MadeRun, made_models: MadeModels
) -> None:
    padded = resume(run, made_models.config(switches=PADDED))
    padded.compute([2])
    again = resume(run, made_models.config(switches=PADDED))
    assert again.plan.fingerprint == padded.plan.fingerprint
    resume(run, made_models.config(switches=REFERENCE)).compute([3])
    last = resume(run, made_models.config(switches=()))
    rest = list(range(4, len(run.plan.shards)))
    assert attention(last) == ["sdpa", "sdpa", "padded", "reference"] + ["sdpa"] * len(rest)
    run.folder.shard(0).unlink()
    mixed = resume(run, made_models.config(switches=PADDED))
    assert attention(mixed) == ["padded", "sdpa", "padded", "reference"] + ["padded"] * len(rest)
    mixed.compute([0, *rest])
    assert pending_shards(run.folder, mixed.plan) == ()


def test_a_run_begun_with_a_switch_goes_on_without(made_models: MadeModels, tmp_path: Path) -> None:
    contigs = write_contigs(tmp_path / "in.fa", 16)
    config = made_models.config(switches=PADDED)
    run = plan_run(tmp_path / "run", contigs, config, shard_seconds=0.02)
    run.compute([0])
    after = resume(run, made_models.config(switches=(), shard_seconds=0.02))
    assert attention(after) == ["padded"] + ["sdpa"] * (len(run.plan.shards) - 1)


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"switches": PADDED, "repr_layer": 2}, "--repr-layer"),
        ({"switches": REFERENCE, "token_budget": 200}, "--token-budget"),
        ({"switches": (), "attention": "reference"}, "--attention"),
    ],
)
def test_a_switch_excuses_only_what_it_decides(
    begun: MadeRun, made_models: MadeModels, setting: dict[str, object], flag: str
) -> None:
    with pytest.raises(MismatchError, match=flag):
        resume(begun, made_models.config(**setting))
    assert read_plan(begun.folder.plan) == begun.plan
