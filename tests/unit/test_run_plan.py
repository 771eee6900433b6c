"""The plan of a run: written once, read back, and compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.run_plan import (
    PlannedHead,
    PlannedModel,
    RunFolder,
    RunPlan,
    Shard,
    read_plan,
    require_same_plan,
    write_plan,
)
from virnuc_core.specs import Family, InputFile, ModelSpec


def model(family: Family, **changes: object) -> PlannedModel:
    spec = ModelSpec(
        family=family,
        num_layers=4,
        embedding_dim=8,
        num_heads=2,
        ffn_dim=32,
        vocab_size=33,
        layer_norm_eps=1e-5,
    )
    planned = PlannedModel(
        name="tiny",
        family=family,
        spec=spec,
        repr_layer=4,
        weights_fingerprint="a" * 64,
        precision="fp32",
        engine="packed",
        attention="sdpa",
        compile_mode="none",
        token_budget=4096,
        location="/models/tiny",
    )
    return replace(planned, **changes)


PLAN = RunPlan(
    kind="predict",
    inputs=(InputFile(name="in.fa", size=10, sha256="b" * 64),),
    input_digest="c" * 64,
    chunk_length=500,
    models=(model("dnabert_s"), model("esm2")),
    head=PlannedHead(name="tiny-500", fingerprint="d" * 64, location="/heads/tiny-500"),
    embeddings="float32",
    shards=(Shard(index=0, begin=0, end=7, cost=1.5), Shard(index=1, begin=7, end=9, cost=0.5)),
    virnuc_version="1.0",
)
MOVED = replace(
    PLAN,
    inputs=(InputFile(name="other.fa", size=11, sha256="e" * 64),),
    models=(model("dnabert_s", name="x", location="/y"), model("esm2", location="/z")),
    head=PlannedHead(name="other", fingerprint="d" * 64, location="/elsewhere"),
)
# What differs, and what the message must say of it.
OTHERS = {
    "input": (replace(PLAN, input_digest="f" * 64), r"input was in\.fa \(cccccccccccc\), now in\.fa \(ffff"),
    "chunk_length": (replace(PLAN, chunk_length=300), r"chunk_length \(--chunk-length\) was 500, now 300"),
    "embeddings": (replace(PLAN, embeddings="none"), r"\(--embeddings\) was float32, now none"),
    "version": (replace(PLAN, virnuc_version="2.0"), r"virnuc_version was 1\.0, now 2\.0"),
    "head": (
        replace(PLAN, head=PlannedHead(name="mine", fingerprint="0" * 64, location="/h")),
        r"head \(--head\) was tiny-500 \(dddddddddddd\), now mine \(000000000000\)",
    ),
    "weights": (
        replace(PLAN, models=(PLAN.models[0], model("esm2", name="3B", weights_fingerprint="9" * 64))),
        r"esm2 model was tiny \(aaaaaaaaaaaa\), now 3B \(999999999999\)\.",
    ),
    "model gone": (replace(PLAN, models=PLAN.models[:1]), r"esm2 model was tiny \(aaaaaaaaaaaa\), now none"),
    "repr_layer": (
        replace(PLAN, models=(PLAN.models[0], model("esm2", repr_layer=2))),
        r"esm2\.repr_layer \(--repr-layer\) was 4, now 2",
    ),
    "token_budget": (
        replace(PLAN, models=(model("dnabert_s", token_budget=1), PLAN.models[1])),
        r"dnabert_s\.token_budget \(--token-budget\) was 4096, now 1",
    ),
    "precision": (
        replace(PLAN, models=(PLAN.models[0], model("esm2", precision="fp16"))),
        r"esm2\.precision \(--precision\) was fp32, now fp16",
    ),
    "precision of the DNA model alone": (
        replace(PLAN, models=(model("dnabert_s", precision="fp16"), PLAN.models[1])),
        r"dnabert_s\.precision \(--dnabert-precision\) was fp32, now fp16",
    ),
    "engine": (
        replace(PLAN, models=(model("dnabert_s", engine="reference"), PLAN.models[1])),
        r"dnabert_s\.engine \(--dnabert-engine\) was packed, now reference",
    ),
    "attention": (
        replace(PLAN, models=(PLAN.models[0], model("esm2", attention="reference"))),
        r"esm2\.attention \(--attention\) was sdpa, now reference",
    ),
    "compile_mode": (
        replace(PLAN, models=(PLAN.models[0], model("esm2", compile_mode="default"))),
        r"esm2\.compile_mode \(--compile-mode\) was none, now default",
    ),
    "shards": (replace(PLAN, shards=PLAN.shards[:1]), r"cut into 2 shards \(--shard-seconds\), now 1"),
}


def test_it_reads_back_equal(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).plan
    for plan in (PLAN, replace(PLAN, head=None, chunk_length=None, kind="embed", shards=())):
        write_plan(path, plan)
        assert read_plan(path) == plan


def test_num_rows_and_models() -> None:
    assert PLAN.num_rows == 9
    assert replace(PLAN, shards=()).num_rows == 0
    assert PLAN.model("esm2") is PLAN.models[1]
    assert replace(PLAN, models=()).model("esm2") is None


def test_names_and_places_do_not_count() -> None:
    assert MOVED.fingerprint == PLAN.fingerprint
    require_same_plan(PLAN, MOVED, Path("run"))


@pytest.mark.parametrize("field", OTHERS)
def test_everything_that_decides_the_numbers_counts(field: str) -> None:
    other, message = OTHERS[field]
    assert other.fingerprint != PLAN.fingerprint
    with pytest.raises(MismatchError, match=message) as caught:
        require_same_plan(PLAN, other, Path("out/run"))
    assert str(caught.value).startswith("out/run holds a run made with something else: ")
    assert "--force" in str(caught.value)


def test_a_cause_is_not_buried_by_what_follows_from_it() -> None:
    spec = replace(PLAN.models[1].spec, num_layers=36)
    other = model("esm2", weights_fingerprint="9" * 64, spec=spec, repr_layer=36, token_budget=7)
    with pytest.raises(MismatchError) as caught:
        require_same_plan(PLAN, replace(PLAN, models=(PLAN.models[0], other), shards=()), Path("run"))
    for word in ("repr_layer", "spec", "token_budget", "shards"):
        assert word not in str(caught.value)


def damage(path: Path, field: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chunk_length", 300, "was altered"),
        ("schema_version", 99, "schema version 99"),
        ("models", [{}], "cannot be read"),
        ("shards", 3, "cannot be read"),
        ("surplus", 3, "cannot be read"),
    ],
)
def test_an_altered_plan_is_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = RunFolder(tmp_path).plan
    write_plan(path, PLAN)
    damage(path, field, value)
    with pytest.raises(DamagedFileError, match=message):
        read_plan(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\xff"])
def test_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = RunFolder(tmp_path).plan
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"plan\.json cannot be read.*--force"):
        read_plan(path)


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="cannot be read"):
        read_plan(RunFolder(tmp_path).plan)
