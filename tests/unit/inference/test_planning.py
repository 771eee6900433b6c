"""Every "auto" is decided once, and a run goes on only with what it was begun with."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.made_models import ESM2, MadeModels, MadeRun, make_head, plan_run
from virnuc_core.env_config import reload
from virnuc_core.errors import CheckpointError, DeviceError, MismatchError, UsageError, VirnucError
from virnuc_core.inference import planning
from virnuc_core.inference.plan import RunPlan, read_plan, require_same_plan, write_plan
from virnuc_core.inference.planning import make_plan, open_plan
from virnuc_core.inference.shard import require_all_shards
from virnuc_core.models import attention, compilation
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig


def plan(run: MadeRun, config: RunConfig, existing: RunPlan | None = None) -> RunPlan:
    return make_plan(config, run.store, "predict", ("cpu",), existing)


def test_auto_is_decided(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = finished_run.plan
    for model in found.models:
        assert (model.precision, model.engine) == ("fp32", "packed")
        assert (model.attention, model.compile_mode) == ("sdpa", "none")
    assert [model.family for model in found.models] == ["dnabert_s", "esm2"]
    assert [model.repr_layer for model in found.models] == [3, 4]
    assert [model.name for model in found.models] == ["dnabert", ESM2.name]
    assert all(Path(model.location).is_absolute() for model in found.models)
    assert found.head is not None
    assert found.head.name == made_models.head.name
    assert found.num_rows == finished_run.store.num_frames
    assert len(found.shards) == 3


def test_frames_of_a_chunk_share_a_shard(finished_run: MadeRun) -> None:
    chunk_of = finished_run.store.frame_chunk
    for shard in finished_run.plan.shards[1:]:
        assert chunk_of[shard.begin] != chunk_of[shard.begin - 1]


def test_the_reference_engine_runs_one_sequence_at_a_time(
    finished_run: MadeRun, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = plan(finished_run, made_models.config(engine="reference"))
    assert "checked against fair-esm and transformers (tests/golden/test_esm2.py" in caplog.text
    assert "outputs of its authors' code" in caplog.text
    for name in re.findall(r"tests/golden/\w+\.py", caplog.text):
        assert (Path(__file__).parents[3] / name).is_file()
    assert {(model.precision, model.attention) for model in found.models} == {("fp32", "reference")}
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
    assert {(model.precision, model.attention) for model in found.models} == {("fp32", "reference")}


@pytest.mark.parametrize(
    ("asked", "attention"), [("triton", "sdpa"), ("sdpa", "sdpa"), ("reference", "reference")]
)
def test_fp32_from_the_environment_replaces_an_attention_for_half_precision(
    finished_run: MadeRun,
    made_models: MadeModels,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    attention: str,
) -> None:
    monkeypatch.setenv("VIRNUC_DISABLE_FP16", "1")
    reload()
    found = plan(finished_run, made_models.config(precision="fp16", attention=asked))
    assert {(model.precision, model.attention) for model in found.models} == {("fp32", attention)}


def test_padding_and_no_compilation_from_the_environment(
    finished_run: MadeRun, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made_models.config(precision="bf16", compile_mode="default")
    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    reload()
    for model in plan(finished_run, config).models:
        assert (model.engine, model.precision, model.attention) == ("packed", "fp32", "padded")
        assert model.compile_mode == "none"
    reference = plan(finished_run, made_models.config(engine="reference"))
    assert {model.attention for model in reference.models} == {"reference"}
    monkeypatch.setenv("VIRNUC_V1_ATTENTION", "1")
    reload()
    assert {model.attention for model in plan(finished_run, config).models} == {"reference"}


def test_layers_over_rectangles_are_not_compiled(
    finished_run: MadeRun, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    config = made_models.config(compile_mode="default")
    assert {model.compile_mode for model in plan(finished_run, config).models} == {"none"}
    assert "layers with sdpa attention are not compiled" in caplog.text


def test_nothing_is_compiled_where_the_environment_says_so(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    config = made_models.config(compile_mode="default")
    model = replace(finished_run.plan.models[0], attention="triton")
    assert planning._plan_compile_mode(config, model, 1.0, None) == "default"
    switched = config.model_copy(update={"switches": ("VIRNUC_DISABLE_COMPILE",)})
    assert planning._plan_compile_mode(switched, model, 1.0, None) == "none"


def test_auto_compiles_only_what_repays_it(finished_run: MadeRun, made_models: MadeModels) -> None:
    model = replace(finished_run.plan.models[0], attention="triton")
    modes = [planning._plan_compile_mode(made_models.config(), model, s, None) for s in (3600.0, 36_000.0)]
    assert modes == ["none", "default"]


@pytest.fixture
def gpu_config(made_models: MadeModels, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Settings of an embed run that can be planned for GPUs where there are none; they say they are H100s."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return made_models.config(dnabert_model=None, head=None, attention="varlen", token_budget=1000)


@pytest.mark.parametrize("per_device", [0.3, 0.7, 1.5])
def test_a_plan_is_the_same_for_any_number_of_gpus(
    finished_run: MadeRun, gpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch, per_device: float
) -> None:
    """Also where the work is enough to be compiled for, on one of them or on each of two."""
    size = gpu_config.model_copy(update={"shard_seconds": 1e-4})
    whole = sum(shard.cost for shard in make_plan(size, finished_run.store, "embed", ("cuda:0",)).shards)
    monkeypatch.setattr(compilation, "_REPAID_AFTER_SECONDS", whole * per_device)
    devices = [tuple(f"cuda:{i}" for i in range(number)) for number in (1, 2, 8)]
    plans = [make_plan(size, finished_run.store, "embed", some) for some in devices]
    assert len(plans[0].shards) >= 8
    assert plans[0].models[0].compile_mode == ("default" if per_device < 1 else "none")
    assert plans[1:] == plans[:1] * 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_that_gains_nothing_is_warned_of_and_recorded(
    finished_run: MadeRun, gpu_config: RunConfig, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    found = make_plan(
        gpu_config.model_copy(update={"compile_mode": mode}), finished_run.store, "embed", ("cuda:0",)
    )
    [warning] = found.warnings
    assert f"compile mode {mode} records CUDA graphs only where shapes are fixed" in warning
    assert ("minutes longer" in warning) == (mode == "max-autotune")
    assert warning in caplog.messages
    quiet = make_plan(
        gpu_config.model_copy(update={"compile_mode": "default"}), finished_run.store, "embed", ("cuda:0",)
    )
    assert quiet.warnings == ()
    assert replace(found, warnings=()).fingerprint == found.fingerprint


def test_a_gpu_without_the_kernels_is_warned_of_and_recorded(
    finished_run: MadeRun,
    gpu_config: RunConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = gpu_config.model_copy(update={"attention": "auto"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = make_plan(config, finished_run.store, "embed", ("cuda:0",))
    [warning] = found.warnings
    assert warning.startswith(
        "cuda:0 (Tesla T4) has compute capability 7.5, below 8.0: virnuc's kernels cannot run"
    )
    assert warning in caplog.messages
    path = finished_run.folder.root / "other-plan.json"
    write_plan(path, found)
    assert read_plan(path) == found
    path.unlink()
    assert (
        make_plan(
            config.model_copy(update={"precision": "fp32"}), finished_run.store, "embed", ("cuda:0",)
        ).warnings
        == ()
    )
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    [warning] = make_plan(config, finished_run.store, "embed", ("cuda:0",)).warnings
    assert warning.startswith("Triton is not installed: virnuc's kernels cannot run")


def test_attention_by_kernels_that_are_not_there_is_refused(
    finished_run: MadeRun, gpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_kernels", lambda device: False)
    with pytest.raises(DeviceError, match="--attention triton needs Triton and a GPU of compute capability"):
        make_plan(
            gpu_config.model_copy(update={"attention": "triton"}), finished_run.store, "embed", ("cuda:0",)
        )


def test_the_dna_model_alone(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = plan(finished_run, made_models.config(dnabert_engine="reference", precision="fp32"))
    assert [model.engine for model in found.models] == ["reference", "packed"]
    assert [model.attention for model in found.models] == ["reference", "sdpa"]
    assert found.models[0].token_budget == 1 < found.models[1].token_budget
    found = plan(finished_run, made_models.config(engine="reference", dnabert_engine="packed"))
    assert [model.engine for model in found.models] == ["packed", "reference"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dnabert_precision": "fp16"}, "does not compute in fp16"),
        ({"precision": "fp16", "dnabert_precision": "fp32"}, "does not compute in fp16"),
        ({"engine": "reference", "dnabert_precision": "bf16"}, "leave out --dnabert-precision bf16"),
        ({"engine": "reference", "precision": "bf16"}, "leave out --precision bf16"),
    ],
)
def test_precision_of_each_model(
    finished_run: MadeRun, made_models: MadeModels, setting: dict[str, str], message: str
) -> None:
    with pytest.raises(VirnucError, match=message):
        plan(finished_run, made_models.config(**setting))


def test_an_engine_for_the_dna_model_goes_before_a_precision_for_both(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    """The protein model is what refuses fp16 on the CPU here."""
    with pytest.raises(DeviceError, match="does not compute in fp16"):
        plan(finished_run, made_models.config(precision="fp16", dnabert_engine="reference"))
    config = made_models.config(precision="fp16", dnabert_engine="reference", esm_model=None)
    [model] = make_plan(config, finished_run.store, "embed", ("cpu",)).models
    assert (model.precision, model.engine) == ("fp32", "reference")


def test_shards_of_the_size_asked_for(finished_run: MadeRun, made_models: MadeModels) -> None:
    one = plan(finished_run, made_models.config())
    assert len(one.shards) == 1
    several = plan(finished_run, made_models.config(shard_seconds=one.shards[0].cost / 4))
    assert len(several.shards) >= 4
    kept = plan(finished_run, made_models.config(), several)
    assert kept.shards == several.shards
    again = plan(finished_run, made_models.config(shard_seconds=one.shards[0].cost / 4), several)
    assert again.shards == several.shards
    other = plan(finished_run, made_models.config(shard_seconds=one.shards[0].cost / 2), several)
    with pytest.raises(MismatchError, match=r"\(--shard-seconds\)"):
        require_same_plan(several, other, RunFolder(Path("run")))


def test_going_on_keeps_a_compile_mode_that_was_found_automatically(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    model = replace(finished_run.plan.models[0], attention="triton")
    before = replace(model, compile_mode="default")
    for setting, mode in (({}, "default"), ({"compile_mode": "none"}, "none")):
        assert planning._plan_compile_mode(made_models.config(**setting), model, 1.0, before) == mode


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
    with pytest.raises(MismatchError, match=r"takes 3328 features, but dnabert gives 96 and .* gives 96\."):
        plan(finished_run, made_models.config(head=str(head)))


def test_a_head_for_chunks_of_another_length_is_refused(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    head = tmp_path / "head.safetensors"
    save_classifier(MLPClassifier(192), head, {"chunk_length": 300})
    with pytest.raises(MismatchError, match="for chunks of 300 bp, and these have 60 bp"):
        plan(finished_run, made_models.config(head=str(head)))
    save_classifier(MLPClassifier(192), head, {"chunk_length": 60})
    assert plan(finished_run, made_models.config(head=str(head))).head is not None


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


@pytest.mark.parametrize("budget", [2**31, 10**20])
@pytest.mark.parametrize("engine", ["packed", "reference"])
def test_a_token_budget_out_of_range_is_refused(
    finished_run: MadeRun, made_models: MadeModels, engine: str, budget: int
) -> None:
    with pytest.raises(UsageError, match=f"--token-budget {budget} cannot be used: give 1 to 2147483647"):
        plan(finished_run, made_models.config(engine=engine, token_budget=budget))


def test_the_largest_token_budget_is_kept(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = plan(finished_run, made_models.config(token_budget=2**31 - 1))
    assert {model.token_budget for model in found.models} == {2**31 - 1}


def test_going_on_with_another_threshold_keeps_the_shards(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config())
    run.compute()
    before = {path: path.read_bytes() for path in run.folder.shards.iterdir()}
    config = made_models.config(threshold=0.9)
    again = open_plan(config, run.store, "predict", ("cpu",), run.folder)
    assert again == read_plan(run.folder.plan) == replace(run.plan, threshold=0.9)
    assert again.fingerprint == run.plan.fingerprint
    require_all_shards(run.folder, again)
    assert before == {path: path.read_bytes() for path in run.folder.shards.iterdir()}
