"""Every "auto" is decided once, and a run goes on only with what it was begun with."""

from pathlib import Path

import pytest

from tests.made_models import ESM2, WIDTH, MadeModels, MadeRun, make_head, plan_run
from virnuc_core.env_config import reload
from virnuc_core.errors import CheckpointError, DeviceError, MismatchError, UsageError
from virnuc_core.inference.planning import make_plan, open_plan
from virnuc_core.run_plan import RunPlan
from virnuc_core.specs import RunConfig


def plan(run: MadeRun, config: RunConfig, existing: RunPlan | None = None) -> RunPlan:
    return make_plan(config, run.store, "predict", ("cpu",), existing)


def test_auto_is_decided(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = finished_run.plan
    assert (found.precision, found.engine, found.attention) == ("fp32", "packed", "sdpa")
    assert [model.family for model in found.models] == ["dnabert_s", "esm2"]
    assert [model.repr_layer for model in found.models] == [3, 4]
    assert [model.name for model in found.models] == ["dnabert", ESM2.name]
    assert all(Path(model.location).is_absolute() for model in found.models)
    assert found.head is not None
    assert found.head.name == made_models.head.name
    assert found.num_rows == finished_run.store.num_frames
    assert len(found.shards) > 3


def test_frames_of_a_chunk_share_a_shard(finished_run: MadeRun) -> None:
    chunk_of = finished_run.store.frame_chunk
    for shard in finished_run.plan.shards[1:]:
        assert chunk_of[shard.begin] != chunk_of[shard.begin - 1]


def test_the_reference_engine_runs_one_sequence_at_a_time(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    found = plan(finished_run, made_models.config(engine="reference"))
    assert (found.precision, found.attention) == ("fp32", "reference")
    assert {model.token_budget for model in found.models} == {1}


@pytest.mark.parametrize("setting", [{"precision": "bf16"}, {"attention": "sdpa"}])
def test_the_reference_engine_refuses_what_it_is_not(
    finished_run: MadeRun, made_models: MadeModels, setting: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match="--engine reference"):
        plan(finished_run, made_models.config(engine="reference", **setting))


def test_switches_of_the_environment(
    finished_run: MadeRun, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError):
        plan(finished_run, made_models.config(precision="fp16"))
    monkeypatch.setenv("VIRNUC_DISABLE_FP16", "1")
    monkeypatch.setenv("VIRNUC_V1_ATTENTION", "1")
    reload()
    found = plan(finished_run, made_models.config(precision="fp16"))
    assert (found.precision, found.attention) == ("fp32", "reference")


def test_the_layer_is_of_the_protein_model_or_of_the_only_one(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    both = plan(finished_run, made_models.config(repr_layer=2))
    assert [model.repr_layer for model in both.models] == [3, 2]
    config = made_models.config(esm_model=None, repr_layer=1, head=None)
    alone = make_plan(config, finished_run.store, "embed", ("cpu",))
    assert [model.repr_layer for model in alone.models] == [1]
    assert alone.head is None
    with pytest.raises(UsageError, match="layer 5"):
        plan(finished_run, made_models.config(repr_layer=5))


def test_a_head_of_another_width_is_refused(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "wide.safetensors", 3328)
    with pytest.raises(MismatchError, match=rf"takes 3328 features, but .* give {2 * WIDTH} \(96 and 96\)"):
        plan(finished_run, made_models.config(head=str(head)))


def test_no_head_is_guessed(finished_run: MadeRun, made_models: MadeModels) -> None:
    with pytest.raises(UsageError, match=r"no head is bundled for dnabert and .*: give --head"):
        plan(finished_run, made_models.config(head=None))


@pytest.mark.parametrize("missing", [{"esm_model": None}, {"dnabert_model": None}])
def test_calls_need_both_models(
    finished_run: MadeRun, made_models: MadeModels, missing: dict[str, None]
) -> None:
    with pytest.raises(UsageError, match="both"):
        plan(finished_run, made_models.config(**missing))


def test_no_model_at_all(finished_run: MadeRun, made_models: MadeModels) -> None:
    with pytest.raises(UsageError, match="no model"):
        plan(finished_run, made_models.config(esm_model=None, dnabert_model=None))


def test_a_model_that_is_not_there(finished_run: MadeRun, made_models: MadeModels) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        plan(finished_run, made_models.config(esm_model="nowhere"))


def test_embedding_nothing_is_refused(finished_run: MadeRun, made_models: MadeModels) -> None:
    config = made_models.config(esm_model=None, embeddings="none")
    with pytest.raises(UsageError, match="--embeddings"):
        make_plan(config, finished_run.store, "embed", ("cpu",))


def test_going_on_keeps_what_was_not_asked_for(
    tmp_path: Path, contigs: Path, made_models: MadeModels
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(token_budget=300), shard_seconds=0.01)
    again = open_plan(made_models.config(), run.store, "predict", ("cpu",), run.folder)
    assert again == run.plan
    assert {model.token_budget for model in again.models} == {300}


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"token_budget": 200}, "--token-budget"),
        ({"repr_layer": 1}, "--repr-layer"),
        ({"embeddings": "none"}, "--emb"),
    ],
)
def test_going_on_with_another_setting_is_refused(
    finished_run: MadeRun, made_models: MadeModels, setting: dict[str, object], flag: str
) -> None:
    with pytest.raises(MismatchError, match=flag):
        open_plan(made_models.config(**setting), finished_run.store, "predict", ("cpu",), finished_run.folder)


@pytest.mark.parametrize("budget", [0, -1, 2**31, 10**20])
@pytest.mark.parametrize("engine", ["packed", "reference"])
def test_a_token_budget_out_of_range_is_refused(
    finished_run: MadeRun, made_models: MadeModels, engine: str, budget: int
) -> None:
    with pytest.raises(UsageError, match=f"--token-budget {budget} cannot be used: give 1 to 2147483647"):
        plan(finished_run, made_models.config(engine=engine, token_budget=budget))


def test_the_largest_token_budget_is_kept(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = plan(finished_run, made_models.config(token_budget=2**31 - 1))
    assert {model.token_budget for model in found.models} == {2**31 - 1}
