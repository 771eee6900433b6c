"""What two plans differ in, and what can be kept of one for the other."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_plans import PLAN, model
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import PlannedHead, RunPlan, require_same_plan, reused_families
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import InputFile

FOLDER = RunFolder(Path("out/run"))
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


def test_names_and_places_do_not_count() -> None:
    assert MOVED.fingerprint == PLAN.fingerprint
    require_same_plan(PLAN, MOVED, FOLDER)


@pytest.mark.parametrize("field", OTHERS)
def test_everything_that_decides_the_numbers_counts(field: str) -> None:
    other, message = OTHERS[field]
    assert other.fingerprint != PLAN.fingerprint
    with pytest.raises(MismatchError, match=message) as caught:
        require_same_plan(PLAN, other, FOLDER)
    assert str(caught.value).startswith("out/run holds a run made with something else: ")
    assert "--force" in str(caught.value)


def test_a_cause_is_not_buried_by_what_follows_from_it() -> None:
    spec = replace(PLAN.models[1].spec, num_layers=36)
    other = model("esm2", weights_fingerprint="9" * 64, spec=spec, repr_layer=36, token_budget=7)
    with pytest.raises(MismatchError) as caught:
        require_same_plan(PLAN, replace(PLAN, models=(PLAN.models[0], other), shards=()), FOLDER)
    for word in ("repr_layer", "spec", "token_budget", "shards"):
        assert word not in str(caught.value)


def refusal(other: RunPlan, existing: RunPlan = PLAN, folder: RunFolder = FOLDER) -> str:
    with pytest.raises(MismatchError) as caught:
        require_same_plan(existing, other, folder)
    return str(caught.value)


@pytest.mark.parametrize("field", sorted(OTHERS.keys() - {"input", "chunk_length", "shards"}))
def test_the_file_and_the_three_ways_out_are_named(field: str) -> None:
    message = refusal(OTHERS[field][0])
    assert "out/run/plan.json" in message
    for way in ("the old setting", "--force", "`virnuc reprocess out/run`"):
        assert way in message


def test_other_input_chunks_or_shards_cannot_be_reprocessed() -> None:
    for field in ("input", "chunk_length", "shards"):
        assert "but not to other input, chunks or shards" in refusal(OTHERS[field][0])


def test_an_embed_run_cannot_be_reprocessed() -> None:
    message = refusal(replace(PLAN, kind="embed", embeddings="float16"), replace(PLAN, kind="embed"))
    assert "--force" in message
    assert "reprocess" not in message


def test_a_move_to_something_else_has_its_own_ways_out(tmp_path: Path) -> None:
    following = RunFolder(tmp_path).next
    following.root.mkdir()
    following.link_frames()
    message = refusal(OTHERS["head"][0], folder=following)
    assert "throw away what was begun with it: --force" in message


def test_what_is_chosen_by_the_precision_does_not_bury_it() -> None:
    other = model("esm2", precision="fp16", attention="triton", token_budget=7, compile_mode="default")
    message = refusal(replace(PLAN, models=(PLAN.models[0], other)))
    for word in ("attention", "token_budget", "compile_mode"):
        assert word not in message


@pytest.mark.parametrize(
    ("field", "families"),
    [
        ("head", {"dnabert_s", "esm2"}),
        ("embeddings", {"dnabert_s", "esm2"}),
        ("weights", {"dnabert_s"}),
        ("repr_layer", {"dnabert_s"}),
        ("precision", {"dnabert_s"}),
        ("attention", {"dnabert_s"}),
        ("compile_mode", {"dnabert_s"}),
        ("token_budget", {"esm2"}),
        ("precision of the DNA model alone", {"esm2"}),
        ("model gone", {"dnabert_s"}),
        ("input", set()),
        ("chunk_length", set()),
        ("version", set()),
        ("shards", set()),
    ],
)
def test_vectors_that_would_be_the_same_are_kept(field: str, families: set[str]) -> None:
    assert reused_families(PLAN, OTHERS[field][0]) == families


@pytest.mark.parametrize("embeddings", ["float16", "none"])
def test_rounded_vectors_are_not_kept(embeddings: str) -> None:
    assert reused_families(replace(PLAN, embeddings=embeddings), PLAN) == set()
