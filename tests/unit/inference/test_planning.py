"""Every "auto" is resolved once; a run is resumed only with its own settings and keeps its frame store."""

import logging
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
from virnuc_core.models import attention
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta
from virnuc_core.specs import CallRule
from virnuc_core.versions import QUACK_VERSION

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
    arithmetic = ("precision", "engine", "attention", "compiled")
    assert values(found, *arithmetic) == [("fp32", "packed", "sdpa", False)] * 2
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
    plan(dnabert_engine="reference")
    assert "engine reference for" in caplog.text
    assert f"precision of {ESM2}: fp32 (auto)" in caplog.text


@pytest.mark.parametrize(
    ("switches", "setting", "expected"),
    [
        ("FP16", {"precision": "fp16", "attention": "triton"}, ("packed", "fp32", "sdpa", 2048)),
        ("FP16", {"precision": "fp16", "attention": "reference"}, ("packed", "fp32", "reference", 2048)),
        ("PACKING", {"precision": "bf16", "attention": "triton"}, ("packed", "fp32", "sdpa", 1)),
        ("PACKING", {"engine": "reference"}, ("reference", "fp32", "reference", 1)),
        ("PACKING V1", {"precision": "bf16"}, ("packed", "fp32", "reference", 1)),
        ("FP16 V1", {"precision": "fp16"}, ("packed", "fp32", "reference", 2048)),
        ("", {"engine": "reference"}, ("reference", "fp32", "reference", 1)),
    ],
)
def test_switches_of_the_environment(
    plan: Planner,
    set_env: Callable[..., None],
    switches: str,
    setting: dict[str, object],
    expected: tuple[object, ...],
) -> None:
    for switch in switches.split():
        set_env(**{"VIRNUC_V1_ATTENTION" if switch == "V1" else f"VIRNUC_DISABLE_{switch}": 1})
    setting = {"token_budget": None, **setting}
    assert values(plan(**setting), "engine", "precision", "attention", "token_budget") == [expected] * 2


def test_layers_are_compiled_where_it_is_asked_for(plan: Planner, set_env: Callable[..., None]) -> None:
    assert values(plan(compile=True), "compiled") == [(True,)] * 2
    assert values(plan(compile=True, dnabert_engine="reference"), "compiled") == [(False,), (True,)]
    with pytest.raises(UsageError, match="omit --compile"):
        plan(compile=True, engine="reference")
    set_env(VIRNUC_DISABLE_COMPILE=1)
    assert values(plan(compile=True), "compiled") == [(False,)] * 2


@pytest.fixture
def plan_gpus(finished_run: MadeRun, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Plans an embed run for H100s without any GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")

    def plan(number: int = 1, **changes: object) -> RunPlan:
        settings = {"dnabert_model": None, "head": None, "attention": "sdpa", "token_budget": 1000}
        devices = tuple(f"cuda:{i}" for i in range(number))
        return make_plan(made_models.config(**{**settings, **changes}), finished_run.store, "embed", devices)

    return plan


def test_a_plan_is_the_same_for_any_number_of_gpus(plan_gpus: Planner) -> None:
    one, *others = (plan_gpus(number, shard_seconds=1e-4) for number in (1, 2, 8))
    assert len(one.shards) >= 8
    assert others == [one] * 2


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


def test_a_hopper_gpu_without_quack_is_warned_of(plan_gpus: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda name: True)
    for found, warnings in (("", 1), ("0.6.4", 1), (QUACK_VERSION, 0)):
        monkeypatch.setattr(planning, "installed_version", lambda package, found=found: found)
        assert len(plan_gpus().warnings) == warnings
    assert plan_gpus(precision="fp32").warnings == ()


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
        ("predict", {"precision": "fp16"}, DeviceError, "does not support fp16"),
        ("predict", {"dnabert_precision": "fp16"}, DeviceError, "does not support fp16"),
        ("predict", {"precision": "fp16", "dnabert_precision": "fp32"}, DeviceError, "not support fp16"),
        ("predict", {"precision": "fp16", "dnabert_engine": "reference"}, DeviceError, "support fp16"),
        ("predict", {"engine": "reference", "dnabert_precision": "bf16"}, UsageError, "--dnabert-precision"),
        ("predict", {"engine": "reference", "precision": "bf16"}, UsageError, "omit --precision bf16"),
        ("predict", {"engine": "reference", "attention": "sdpa"}, UsageError, "omit --attention sdpa"),
        ("predict", {"repr_layer": 5}, UsageError, "layer 5"),
        (
            "predict",
            {"head": None},
            UsageError,
            r"no classifier head is bundled for dnabert and .*: give --head",
        ),
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


def test_a_head_for_other_models_is_refused(plan: Planner, tmp_path: Path) -> None:
    wide = make_head(tmp_path / "wide.safetensors", 3328)
    with pytest.raises(MismatchError, match=r"takes 3328 features, but dnabert gives 96 and .* gives 96\."):
        plan(head=str(wide))


def test_resuming_keeps_what_was_not_asked_for_and_takes_another_rule_of_calls(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config(token_budget=2**31 - 1))
    for rule in ({"threshold": 0.9}, {"fdr": 0.05}, {"prior": 0.2}, {}):
        again = open_plan(made_models.config(**rule), run.store, "predict", ("cpu",), run.folder)
        assert again == read_plan(run.folder.plan) == replace(run.plan, calls=CallRule(**rule))
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
    index_inputs(folder, [str(fasta)], 60, "dna", min_length=min_length)
    return StoreMeta.read(folder.frames)


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
