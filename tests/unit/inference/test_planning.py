"""Every "auto" is resolved once; a run is resumed only with its own settings and keeps its frame store."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.made_models import ESM2, MadeModels, MadeRun, make_esm2, make_head, plan_run
from virnuc_core.errors import (
    CheckpointError,
    DeviceError,
    InputError,
    MismatchError,
    UsageError,
    VirnucError,
)
from virnuc_core.inference import planning
from virnuc_core.inference.plan import RunPlan, read_plan, write_plan
from virnuc_core.inference.planning import index_inputs, make_plan, open_plan
from virnuc_core.models import attention, compilation
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

Planner = Callable[..., RunPlan]


@pytest.fixture
def plan(finished_run: MadeRun, made_models: MadeModels) -> Planner:
    """Plans the finished run with other settings."""

    def plan(kind: str = "predict", existing: RunPlan | None = None, **changes: object) -> RunPlan:
        return make_plan(made_models.config(**changes), finished_run.store, kind, ("cpu",), existing)

    return plan


def values(found: RunPlan, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(model, name) for name in names) for model in found.models]


def test_auto_is_decided(finished_run: MadeRun, made_models: MadeModels) -> None:
    found = finished_run.plan
    arithmetic = ("precision", "engine", "attention", "compile_mode")
    assert values(found, *arithmetic) == [("fp32", "packed", "sdpa", "none")] * 2
    identity = [("dnabert_s", 3, "dnabert"), ("esm2", 4, ESM2.name)]
    assert values(found, "family", "repr_layer", "name") == identity
    assert all(Path(model.location).is_absolute() for model in found.models)
    assert found.head is not None
    assert found.head.name == made_models.head.name
    assert (found.num_rows, len(found.shards)) == (finished_run.store.num_frames, 3)
    chunk_of = finished_run.store.frame_chunk
    for shard in found.shards[1:]:
        assert chunk_of[shard.begin] != chunk_of[shard.begin - 1]


def test_what_is_decided_is_logged(plan: Planner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert values(plan(compile_mode="default"), "compile_mode") == [("none",)] * 2
    assert "layers with sdpa attention are not compiled" in caplog.text
    plan(engine="reference")
    assert "checked against fair-esm and transformers (tests/golden/test_esm2.py" in caplog.text
    assert "outputs of its authors' code" in caplog.text
    for name in re.findall(r"tests/golden/\w+\.py", caplog.text):
        assert (Path(__file__).parents[3] / name).is_file()


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
    plan: Planner,
    set_env: Callable[..., None],
    switches: str,
    setting: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    for switch in switches.split():
        set_env(**{"VIRNUC_V1_ATTENTION" if switch == "V1" else f"VIRNUC_DISABLE_{switch}": 1})
    assert values(plan(**setting), "engine", "precision", "attention", "compile_mode") == [expected] * 2


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
def plan_gpus(finished_run: MadeRun, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Plans an embed run for H100s without any GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")

    def plan(number: int = 1, **changes: object) -> RunPlan:
        settings = {"dnabert_model": None, "head": None, "attention": "varlen", "token_budget": 1000}
        devices = tuple(f"cuda:{i}" for i in range(number))
        return make_plan(made_models.config(**{**settings, **changes}), finished_run.store, "embed", devices)

    return plan


@pytest.mark.parametrize("per_device", [0.3, 0.7, 1.5])
def test_a_plan_is_the_same_for_any_number_of_gpus(
    plan_gpus: Planner, monkeypatch: pytest.MonkeyPatch, per_device: float
) -> None:
    """Also with enough work to compile the model, on one of them or on each of two."""
    whole = sum(shard.cost for shard in plan_gpus(shard_seconds=1e-4).shards)
    monkeypatch.setattr(compilation, "_REPAID_AFTER_SECONDS", whole * per_device)
    one, *others = (plan_gpus(number, shard_seconds=1e-4) for number in (1, 2, 8))
    assert len(one.shards) >= 8
    assert one.models[0].compile_mode == ("default" if per_device < 1 else "none")
    assert others == [one] * 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_that_gains_nothing_is_warned_of_and_recorded(
    plan_gpus: Planner, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    found = plan_gpus(compile_mode=mode)
    [warning] = found.warnings
    assert f"compile mode {mode} records CUDA graphs only where shapes are fixed" in warning
    assert ("minutes longer" in warning) == (mode == "max-autotune")
    assert warning in caplog.messages
    assert plan_gpus(compile_mode="default").warnings == ()
    assert replace(found, warnings=()).fingerprint == found.fingerprint


def test_a_gpu_without_the_kernels_is_warned_of_and_recorded(
    plan_gpus: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = plan_gpus(attention="auto")
    [warning] = found.warnings
    assert "cuda:0 (Tesla T4) has compute capability 7.5, below 8.0: virnuc's kernels cannot run" in warning
    write_plan(tmp_path / "plan.json", found)
    assert read_plan(tmp_path / "plan.json") == found
    assert plan_gpus(attention="auto", precision="fp32").warnings == ()
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    [warning] = plan_gpus(attention="auto").warnings
    assert warning.startswith("Triton is not installed: virnuc's kernels cannot run")
    monkeypatch.setattr(attention, "has_kernels", lambda device: False)
    with pytest.raises(DeviceError, match="--attention triton needs Triton and a GPU of compute capability"):
        plan_gpus(attention="triton")


def test_settings_of_one_model(plan: Planner) -> None:
    """The DNA model's settings override the shared ones; the layer is the protein model's, or the only one's."""
    found = plan(dnabert_engine="reference", precision="fp32", repr_layer=2)
    expected = [("reference", "reference", 3), ("packed", "sdpa", 2)]
    assert values(found, "engine", "attention", "repr_layer") == expected
    assert found.models[0].token_budget == 1 < found.models[1].token_budget
    found = plan(engine="reference", dnabert_engine="packed")
    assert values(found, "engine") == [("packed",), ("reference",)]
    one = {"esm_model": None, "repr_layer": 1, "head": None}
    found = plan("embed", precision="fp16", dnabert_engine="reference", **one)
    assert values(found, "precision", "engine", "repr_layer") == [("fp32", "reference", 1)]
    assert found.head is None


@pytest.mark.parametrize(
    ("kind", "setting", "error", "message"),
    [
        ("predict", {"precision": "fp16"}, DeviceError, "does not compute in fp16"),
        ("predict", {"dnabert_precision": "fp16"}, DeviceError, "does not compute in fp16"),
        ("predict", {"precision": "fp16", "dnabert_precision": "fp32"}, DeviceError, "not compute in fp16"),
        ("predict", {"precision": "fp16", "dnabert_engine": "reference"}, DeviceError, "compute in fp16"),
        ("predict", {"engine": "reference", "dnabert_precision": "bf16"}, UsageError, "--dnabert-precision"),
        ("predict", {"engine": "reference", "precision": "bf16"}, UsageError, "out --precision bf16"),
        ("predict", {"engine": "reference", "attention": "sdpa"}, UsageError, "leave out --attention sdpa"),
        ("predict", {"token_budget": 2**31}, UsageError, "budget 2147483648 cannot be used: give 1 to 21474"),
        ("predict", {"token_budget": 10**20, "engine": "reference"}, UsageError, "budget 1000+ cannot be"),
        ("predict", {"repr_layer": 5}, UsageError, "layer 5"),
        ("predict", {"head": None}, UsageError, r"no head is bundled for dnabert and .*: give --head"),
        ("predict", {"esm_model": None}, UsageError, "both"),
        ("predict", {"dnabert_model": None}, UsageError, "both"),
        ("predict", {"esm_model": None, "dnabert_model": None}, UsageError, "no model"),
        ("predict", {"esm_model": "nowhere"}, CheckpointError, "nowhere"),
        ("embed", {"esm_model": None, "embeddings": "none"}, UsageError, "--embeddings"),
    ],
)
def test_settings_that_cannot_be_used(
    plan: Planner, kind: str, setting: dict[str, object], error: type[VirnucError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(kind, **setting)


def test_a_head_for_other_models_or_chunks_is_refused(plan: Planner, tmp_path: Path) -> None:
    wide = make_head(tmp_path / "wide.safetensors", 3328)
    with pytest.raises(MismatchError, match=r"takes 3328 features, but dnabert gives 96 and .* gives 96\."):
        plan(head=str(wide))
    head = tmp_path / "head.safetensors"
    save_classifier(MLPClassifier(192), head, {"chunk_length": 300})
    with pytest.raises(MismatchError, match="for chunks of 300 bp, and these have 60 bp"):
        plan(head=str(head))
    save_classifier(MLPClassifier(192), head, {"chunk_length": 60})
    assert plan(head=str(head)).head is not None


def test_resuming_keeps_what_was_not_asked_for_and_takes_another_threshold_or_rate(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config(token_budget=2**31 - 1))
    config = made_models.config(threshold=0.9)
    again = open_plan(config, run.store, "predict", ("cpu",), run.folder)
    assert again == read_plan(run.folder.plan) == replace(run.plan, threshold=0.9)
    assert again.fingerprint == run.plan.fingerprint
    for fdr in (0.05, 0.2, None):
        again = open_plan(made_models.config(fdr=fdr), run.store, "predict", ("cpu",), run.folder)
        assert again == read_plan(run.folder.plan) == replace(run.plan, fdr=fdr)
        assert again.fingerprint == run.plan.fingerprint
    others = make_esm2(tmp_path / "others", seed=9)
    copied = make_esm2(tmp_path / "esm2"), make_esm2(tmp_path / "copy")
    run = plan_run(tmp_path / "second", contigs, made_models.config(esm_model=str(copied[0])))
    config = made_models.config(esm_model=str(copied[1]))
    assert open_plan(config, run.store, "predict", ("cpu",), run.folder) == run.plan
    with pytest.raises(
        MismatchError, match=r"esm2.weights_fingerprint: was esm2 \(\w{12}\), now others \(\w{12}\)"
    ):
        open_plan(made_models.config(esm_model=str(others)), run.store, "predict", ("cpu",), run.folder)


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
