"""Emergency switches: they travel with a run, and rescue one in progress."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, make_models, plan_run, write_contigs
from tests.made_moves import begin_move, content, from_nothing, write_results
from virnuc_core.env_config import reload
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import make_plan, open_plan
from virnuc_core.inference.reuse import ReusedShards
from virnuc_core.inference.shard import pending_shards
from virnuc_core.results.integrity import check_run
from virnuc_core.results.run_opening import drop_next
from virnuc_core.settings import RunConfig

PADDED = ("VIRNUC_DISABLE_PACKING",)
REFERENCE = ("VIRNUC_V1_ATTENTION",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run(models: MadeModels, tmp_path: Path) -> MadeRun:
    """A run of at least five shards, the first two computed."""
    contigs = write_contigs(tmp_path / "in.fa", 16)
    made = plan_run(tmp_path / "run", contigs, models.config(switches=()), shard_seconds=0.012)
    assert len(made.plan.shards) >= 5
    made.compute([0, 1])
    return made


def resume(run: MadeRun, config: RunConfig) -> MadeRun:
    """Plans the run again with other settings."""
    return replace(run, plan=open_plan(config, run.store, "predict", ("cpu",), run.folder))


def attention(run: MadeRun) -> list[str]:
    """Attention backend of the protein model in each shard."""
    return [run.plan.for_shard(shard.index).models[1].attention for shard in run.plan.shards]


def shard_bytes(run: MadeRun) -> list[bytes]:
    return [run.folder.shard(shard.index).read_bytes() for shard in run.plan.shards]


def test_those_of_the_plan_win_over_the_environment_of_who_plans(
    run: MadeRun, models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker plans only with the switches of the run's submitter."""

    def planned(config: RunConfig) -> set[str]:
        plan = make_plan(config, run.store, "predict", ("cpu",))
        return {model.attention for model in plan.models}

    assert planned(models.config(switches=PADDED)) == {"padded"}
    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    reload()
    assert planned(models.config()) == {"padded"}
    assert planned(models.config(switches=REFERENCE)) == {"reference"}
    assert planned(models.config(switches=())) == {"sdpa"}


def test_missing_shards_compute_with_the_switch(
    run: MadeRun, models: MadeModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [run.folder.shard(index).read_bytes() for index in (0, 1)]
    with caplog.at_level(logging.WARNING):
        rescued = resume(run, models.config(switches=PADDED))
    missing = len(run.plan.shards) - 2
    assert f"(VIRNUC_DISABLE_PACKING): {missing} of {len(run.plan.shards)} shards are missing" in caplog.text
    assert attention(rescued) == ["sdpa"] * 2 + ["padded"] * missing
    assert rescued.plan == read_plan(run.folder.plan)
    assert rescued.plan.fingerprint != run.plan.fingerprint
    assert pending_shards(rescued.folder, rescued.plan) == tuple(range(2, len(run.plan.shards)))
    # A lost shard is recomputed with its original arithmetic.
    run.folder.shard(1).unlink()
    rescued.compute(range(1, len(run.plan.shards)))
    assert pending_shards(run.folder, rescued.plan) == ()

    padded = from_nothing(replace(rescued, plan=rescued.plan.for_shard(2)), tmp_path / "padded")
    assert shard_bytes(rescued)[:2] == kept
    assert shard_bytes(rescued)[2:] == shard_bytes(padded)[2:]
    write_results(rescued)
    findings = {finding.path.name: finding for finding in check_run(rescued.folder, thorough=True)}
    bad = {name for name, finding in findings.items() if finding.is_bad}
    assert bad == {"report.html", "run.json"}  # written only by flows
    assert {findings[f"shard_{shard.index:05d}.h5"].state for shard in run.plan.shards} == {"whole"}
    assert findings["embeddings.h5"].state == "whole"


def test_each_shard_computes_with_the_switches_that_were_set_when_it_was_missing(
    run: MadeRun, models: MadeModels
) -> None:
    padded = resume(run, models.config(switches=PADDED))
    padded.compute([2])
    again = resume(run, models.config(switches=PADDED))
    assert again.plan.fingerprint == padded.plan.fingerprint
    resume(run, models.config(switches=REFERENCE)).compute([3])
    last = resume(run, models.config(switches=()))
    rest = list(range(4, len(run.plan.shards)))
    assert attention(last) == ["sdpa", "sdpa", "padded", "reference"] + ["sdpa"] * len(rest)
    run.folder.shard(0).unlink()
    mixed = resume(run, models.config(switches=PADDED))
    assert attention(mixed) == ["padded", "sdpa", "padded", "reference"] + ["padded"] * len(rest)
    mixed.compute([0, *rest])
    assert pending_shards(run.folder, mixed.plan) == ()


def test_a_run_begun_with_a_switch_goes_on_without(models: MadeModels, tmp_path: Path) -> None:
    contigs = write_contigs(tmp_path / "in.fa", 16)
    run = plan_run(tmp_path / "run", contigs, models.config(switches=PADDED), shard_seconds=0.02)
    run.compute([0])
    after = resume(run, models.config(switches=(), shard_seconds=0.02))
    assert attention(after) == ["padded"] + ["sdpa"] * (len(run.plan.shards) - 1)


@pytest.mark.parametrize(
    ("switches", "setting", "flag"),
    [
        (PADDED, {"repr_layer": 2}, "--repr-layer"),
        (REFERENCE, {"token_budget": 200}, "--token-budget"),
        ((), {"attention": "reference"}, "--attention"),
    ],
)
def test_a_switch_excuses_only_what_it_decides(
    run: MadeRun, models: MadeModels, switches: tuple[str, ...], setting: dict[str, object], flag: str
) -> None:
    with pytest.raises(MismatchError, match=flag):
        resume(run, models.config(switches=switches, **setting))
    assert read_plan(run.folder.plan) == run.plan


def test_a_finished_run_stays_as_it_is_and_says_so(
    run: MadeRun, models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    run.compute(range(2, len(run.plan.shards)))
    with caplog.at_level(logging.WARNING):
        resume(run, models.config(switches=PADDED))
    assert "(VIRNUC_DISABLE_PACKING) stay as they are" in caplog.text
    assert read_plan(run.folder.plan) == run.plan


def test_reprocessing_makes_all_shards_alike(run: MadeRun, models: MadeModels, tmp_path: Path) -> None:
    rescued = resume(run, models.config(switches=PADDED))
    rescued.compute(range(2, len(run.plan.shards)))
    for switches, kept_shards in (((), {0, 1}), (PADDED, set(range(2, len(run.plan.shards))))):
        moved = begin_move(rescued, models.config(switches=switches))
        kept = ReusedShards.open(moved.folder, moved.plan)
        assert kept is not None
        assert kept.families == {"dnabert_s", "esm2"}
        assert {s.index for s in moved.plan.shards if kept.read(s)} == kept_shards
        moved.compute()
        fresh = from_nothing(moved, tmp_path / f"fresh{len(switches)}")
        assert content(moved.folder) == content(fresh.folder)
        drop_next(rescued.folder)
