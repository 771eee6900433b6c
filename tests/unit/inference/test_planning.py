"""Every "auto" is resolved once; a run is resumed only with its own settings and keeps its frame store."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.made_models import ESM2, MadeModels, MadeRun, make_head, plan_run
from virnuc_core.env_config import reload
from virnuc_core.errors import (
    CheckpointError,
    DeviceError,
    InputError,
    MismatchError,
    UsageError,
    VirnucError,
)
from virnuc_core.inference import planning
from virnuc_core.inference.plan import RunPlan, read_plan, require_same_plan, write_plan
from virnuc_core.inference.planning import index_inputs, make_plan, open_plan
from virnuc_core.inference.shard import require_all_shards
from virnuc_core.models import attention, compilation
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta
from virnuc_core.settings import RunConfig


def plan(run: MadeRun, config: RunConfig, existing: RunPlan | None = None) -> RunPlan:
    return make_plan(config, run.store, "predict", ("cpu",), existing)


def values(found: RunPlan, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(model, name) for name in names) for model in found.models]


def test_auto_is_decided(
    finished_run: MadeRun, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    found = finished_run.plan
    assert (
        values(found, "precision", "engine", "attention", "compile_mode")
        == [("fp32", "packed", "sdpa", "none")] * 2
    )
    assert values(found, "family", "repr_layer", "name") == [
        ("dnabert_s", 3, "dnabert"),
        ("esm2", 4, ESM2.name),
    ]
    assert all(Path(model.location).is_absolute() for model in found.models)
    assert found.head is not None
    assert found.head.name == made_models.head.name
    assert (found.num_rows, len(found.shards)) == (finished_run.store.num_frames, 3)
    chunk_of = finished_run.store.frame_chunk
    for shard in found.shards[1:]:
        assert chunk_of[shard.begin] != chunk_of[shard.begin - 1]
    with caplog.at_level(logging.INFO):
        compiled = plan(finished_run, made_models.config(compile_mode="default"))
    assert values(compiled, "compile_mode") == [("none",)] * 2
    assert "layers with sdpa attention are not compiled" in caplog.text


def test_the_reference_engine_names_what_it_is_checked_against(
    finished_run: MadeRun, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = plan(finished_run, made_models.config(engine="reference"))
    assert "checked against fair-esm and transformers (tests/golden/test_esm2.py" in caplog.text
    assert "outputs of its authors' code" in caplog.text
    for name in re.findall(r"tests/golden/\w+\.py", caplog.text):
        assert (Path(__file__).parents[3] / name).is_file()
    assert values(found, "precision", "attention", "token_budget") == [("fp32", "reference", 1)] * 2


@pytest.mark.parametrize(
    ("switches", "setting", "expected"),
    [
        ("FP16", {"precision": "fp16", "attention": "triton"}, ("packed", "fp32", "sdpa", "none")),
        ("FP16", {"precision": "fp16", "attention": "reference"}, ("packed", "fp32", "reference", "none")),
        ("PACKING", {"precision": "bf16", "compile_mode": "default"}, ("packed", "fp32", "padded", "none")),
        ("PACKING", {"engine": "reference"}, ("reference", "fp32", "reference", "none")),
        ("PACKING V1", {"precision": "bf16"}, ("packed", "fp32", "reference", "none")),
        ("FP16 V1", {"precision": "fp16"}, ("packed", "fp32", "reference", "none")),
        ("", {"engine": "reference"}, ("reference", "fp32", "reference", "none")),
    ],
)
def test_switches_of_the_environment(
    finished_run: MadeRun,
    made_models: MadeModels,
    monkeypatch: pytest.MonkeyPatch,
    switches: str,
    setting: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    for switch in switches.split():
        name = "VIRNUC_V1_ATTENTION" if switch == "V1" else f"VIRNUC_DISABLE_{switch}"
        monkeypatch.setenv(name, "1")
    reload()
    found = plan(finished_run, made_models.config(**setting))
    assert values(found, "engine", "precision", "attention", "compile_mode") == [expected] * 2


@pytest.mark.parametrize(
    ("setting", "before", "hours", "mode"),
    [
        ({"compile_mode": "default"}, None, 0.1, "default"),
        ({"compile_mode": "default", "switches": ("VIRNUC_DISABLE_COMPILE",)}, None, 0.1, "none"),
        ({}, None, 1, "none"),
        ({}, None, 10, "default"),
        ({}, "default", 0.1, "default"),
        ({"compile_mode": "none"}, "default", 0.1, "none"),
    ],
)
def test_compile_mode(
    finished_run: MadeRun,
    made_models: MadeModels,
    setting: dict[str, object],
    before: str | None,
    hours: float,
    mode: str,
) -> None:
    model = replace(finished_run.plan.models[0], attention="triton")
    earlier = replace(model, compile_mode=before) if before else None
    config = made_models.config(**setting)
    assert planning._plan_compile_mode(config, model, 3600 * hours, earlier) == mode


@pytest.fixture
def gpu_config(made_models: MadeModels, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Settings of an embed run that can be planned for H100s without any GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return made_models.config(dnabert_model=None, head=None, attention="varlen", token_budget=1000)


def plan_gpus(run: MadeRun, config: RunConfig, number: int = 1, **changes: object) -> RunPlan:
    devices = tuple(f"cuda:{i}" for i in range(number))
    return make_plan(config.model_copy(update=changes), run.store, "embed", devices)


@pytest.mark.parametrize("per_device", [0.3, 0.7, 1.5])
def test_a_plan_is_the_same_for_any_number_of_gpus(
    finished_run: MadeRun, gpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch, per_device: float
) -> None:
    """Also with enough work to compile the model, on one of them or on each of two."""
    whole = sum(shard.cost for shard in plan_gpus(finished_run, gpu_config, shard_seconds=1e-4).shards)
    monkeypatch.setattr(compilation, "_REPAID_AFTER_SECONDS", whole * per_device)
    one, *others = (plan_gpus(finished_run, gpu_config, n, shard_seconds=1e-4) for n in (1, 2, 8))
    assert len(one.shards) >= 8
    assert one.models[0].compile_mode == ("default" if per_device < 1 else "none")
    assert others == [one] * 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_that_gains_nothing_is_warned_of_and_recorded(
    finished_run: MadeRun, gpu_config: RunConfig, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    found = plan_gpus(finished_run, gpu_config, compile_mode=mode)
    [warning] = found.warnings
    assert f"compile mode {mode} records CUDA graphs only where shapes are fixed" in warning
    assert ("minutes longer" in warning) == (mode == "max-autotune")
    assert warning in caplog.messages
    assert plan_gpus(finished_run, gpu_config, compile_mode="default").warnings == ()
    assert replace(found, warnings=()).fingerprint == found.fingerprint


def test_a_gpu_without_the_kernels_is_warned_of_and_recorded(
    finished_run: MadeRun, gpu_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = plan_gpus(finished_run, gpu_config, attention="auto")
    [warning] = found.warnings
    assert "cuda:0 (Tesla T4) has compute capability 7.5, below 8.0: virnuc's kernels cannot run" in warning
    write_plan(tmp_path / "plan.json", found)
    assert read_plan(tmp_path / "plan.json") == found
    assert plan_gpus(finished_run, gpu_config, attention="auto", precision="fp32").warnings == ()
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    [warning] = plan_gpus(finished_run, gpu_config, attention="auto").warnings
    assert warning.startswith("Triton is not installed: virnuc's kernels cannot run")
    monkeypatch.setattr(attention, "has_kernels", lambda device: False)
    with pytest.raises(DeviceError, match="--attention triton needs Triton and a GPU of compute capability"):
        plan_gpus(finished_run, gpu_config, attention="triton")


def test_settings_of_one_model(finished_run: MadeRun, made_models: MadeModels) -> None:
    """The DNA model's settings override the shared ones; the layer is the protein model's, or the only one's."""
    found = plan(finished_run, made_models.config(dnabert_engine="reference", precision="fp32", repr_layer=2))
    assert values(found, "engine", "attention", "repr_layer") == [
        ("reference", "reference", 3),
        ("packed", "sdpa", 2),
    ]
    assert found.models[0].token_budget == 1 < found.models[1].token_budget
    found = plan(finished_run, made_models.config(engine="reference", dnabert_engine="packed"))
    assert [model.engine for model in found.models] == ["packed", "reference"]
    config = made_models.config(
        precision="fp16", dnabert_engine="reference", esm_model=None, repr_layer=1, head=None
    )
    found = make_plan(config, finished_run.store, "embed", ("cpu",))
    assert values(found, "precision", "engine", "repr_layer") == [("fp32", "reference", 1)]
    assert found.head is None


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"precision": "fp16"}, DeviceError, "does not compute in fp16"),
        ({"dnabert_precision": "fp16"}, DeviceError, "does not compute in fp16"),
        ({"precision": "fp16", "dnabert_precision": "fp32"}, DeviceError, "does not compute in fp16"),
        ({"precision": "fp16", "dnabert_engine": "reference"}, DeviceError, "does not compute in fp16"),
        ({"engine": "reference", "dnabert_precision": "bf16"}, UsageError, "out --dnabert-precision bf16"),
        ({"engine": "reference", "precision": "bf16"}, UsageError, "leave out --precision bf16"),
        ({"engine": "reference", "attention": "sdpa"}, UsageError, "leave out --attention sdpa"),
        ({"token_budget": 2**31}, UsageError, "budget 2147483648 cannot be used: give 1 to 2147483647"),
        ({"token_budget": 10**20, "engine": "reference"}, UsageError, "--token-budget 1000+ cannot be used"),
        ({"repr_layer": 5}, UsageError, "layer 5"),
        ({"head": None}, UsageError, r"no head is bundled for dnabert and .*: give --head"),
        ({"esm_model": None}, UsageError, "both"),
        ({"dnabert_model": None}, UsageError, "both"),
        ({"esm_model": None, "dnabert_model": None}, UsageError, "no model"),
        ({"esm_model": "nowhere"}, CheckpointError, "nowhere"),
    ],
)
def test_settings_that_cannot_be_used(
    finished_run: MadeRun,
    made_models: MadeModels,
    setting: dict[str, object],
    error: type[VirnucError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        plan(finished_run, made_models.config(**setting))
    config = made_models.config(esm_model=None, embeddings="none")
    with pytest.raises(UsageError, match="--embeddings"):
        make_plan(config, finished_run.store, "embed", ("cpu",))


def test_a_head_for_other_models_or_chunks_is_refused(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    wide = make_head(tmp_path / "wide.safetensors", 3328)
    with pytest.raises(MismatchError, match=r"takes 3328 features, but dnabert gives 96 and .* gives 96\."):
        plan(finished_run, made_models.config(head=str(wide)))
    head = tmp_path / "head.safetensors"
    save_classifier(MLPClassifier(192), head, {"chunk_length": 300})
    with pytest.raises(MismatchError, match="for chunks of 300 bp, and these have 60 bp"):
        plan(finished_run, made_models.config(head=str(head)))
    save_classifier(MLPClassifier(192), head, {"chunk_length": 60})
    assert plan(finished_run, made_models.config(head=str(head))).head is not None


def test_shards_of_the_size_asked_for(finished_run: MadeRun, made_models: MadeModels) -> None:
    [whole] = plan(finished_run, made_models.config()).shards
    quarter = made_models.config(shard_seconds=whole.cost / 4)
    several = plan(finished_run, quarter)
    assert len(several.shards) >= 4
    for config in (made_models.config(), quarter):
        assert plan(finished_run, config, several).shards == several.shards
    other = plan(finished_run, made_models.config(shard_seconds=whole.cost / 2), several)
    with pytest.raises(MismatchError, match=r"\(--shard-seconds\)"):
        require_same_plan(several, other, RunFolder(Path("run")))


def test_resuming_keeps_what_was_not_asked_for_and_takes_another_threshold(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config(token_budget=2**31 - 1))
    run.compute()
    config = made_models.config(threshold=0.9)
    again = open_plan(config, run.store, "predict", ("cpu",), run.folder)
    assert again == read_plan(run.folder.plan) == replace(run.plan, threshold=0.9)
    assert again.fingerprint == run.plan.fingerprint
    require_all_shards(run.folder, again)


def index(folder: RunFolder, fasta: Path, min_length: int) -> StoreMeta:
    return index_inputs(folder, [str(fasta)], 60, "dna", min_length=min_length)


def test_a_frame_store_is_kept_for_the_same_files_and_settings_only(tmp_path: Path) -> None:
    folder, fasta = RunFolder(tmp_path / "run"), tmp_path / "in.fa"
    fasta.write_text(f">long\n{'ATG' * 100}\n>border\n{'ATG' * 50}\n>short\n{'ATG' * 49}AT\n>none\n\n")
    folder.root.mkdir()
    meta = index(folder, fasta, 150)
    assert (meta.num_records, meta.num_rejected, meta.min_length) == (2, 2, 150)
    rejected = [line.split("\t") for line in folder.rejected.read_text().splitlines()[1:]]
    assert [(row[1], row[3], row[4]) for row in rejected] == [
        ("short", "149", "shorter than 150 (--min-length)"),
        ("none", "0", "empty sequence"),
    ]
    inode = (folder.frames / "meta.json").stat().st_ino
    assert index(folder, fasta, 150) == meta
    assert (folder.frames / "meta.json").stat().st_ino == inode
    column = folder.frames / "dna.bin"
    column.write_bytes(b"N" + column.read_bytes()[1:])
    assert index(folder, fasta, 150) == meta
    assert not column.read_bytes().startswith(b"N")
    assert index(folder, fasta, 0).num_records == 3
    with pytest.raises(InputError, match=r"none of the 4 records .* or a smaller --min-length"):
        index(folder, fasta, 301)


def test_the_frame_store_of_a_run_is_not_replaced_by_another(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config())
    before = StoreMeta.read(run.folder.frames)
    with pytest.raises(MismatchError, match=r"min_length \(--min-length\) was 0, now 150"):
        index(run.folder, contigs, 150)
    other = tmp_path / "other.fa"
    other.write_text(">other\nACGT\n")
    with pytest.raises(MismatchError, match=r"input was .* now other\.fa"):
        index(run.folder, other, 0)
    assert StoreMeta.read(run.folder.frames) == before == index(run.folder, contigs, 0)
