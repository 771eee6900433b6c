"""The plan of a run: written once, read back, compared, and what can be reused of one for another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability.hostile import hostile_json
from tests.made_plans import PLAN, model
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.plan import (
    PlannedHead,
    RunPlan,
    Shard,
    read_plan,
    require_same_plan,
    reused_families,
    write_plan,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import InputFile

FOLDER = RunFolder(Path("out/run"))
BOTH = {"dnabert_s", "esm2"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return RunFolder(tmp_path).plan


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, head=None, chunk_length=None, kind="embed", shards=())])
def test_it_reads_back_equal(path: Path, plan: RunPlan) -> None:
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert plan.num_rows == (9 if plan.shards else 0)


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
def test_an_altered_plan_is_refused(path: Path, field: str, value: object, message: str) -> None:
    write_plan(path, PLAN)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(DamagedFileError, match=message):
        read_plan(path)


@pytest.mark.parametrize("content", [None, *hostile_json("shards").values()])
def test_something_else_is_refused(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"plan .*plan\.json .*--force"):
        read_plan(path)


@pytest.mark.parametrize(
    "bounds",
    [[(0, 0, 3), (1, 4, 9)], [(0, 0, 5), (1, 4, 9)], [(0, 0, 5), (1, 5, 4)], [(1, 0, 9)], [(0, 1, 9)]],
)
def test_shards_that_do_not_follow_one_another(path: Path, bounds: list[tuple[int, int, int]]) -> None:
    shards = tuple(Shard(index=index, begin=begin, end=end, cost=1.0) for index, begin, end in bounds)
    write_plan(path, replace(PLAN, shards=shards))
    with pytest.raises(DamagedFileError, match="do not follow one another"):
        read_plan(path)


def with_dna(**changes: object) -> RunPlan:
    return replace(PLAN, models=(model("dnabert_s", **changes), PLAN.models[1]))


def with_esm2(**changes: object) -> RunPlan:
    return replace(PLAN, models=(PLAN.models[0], model("esm2", **changes)))


OTHER_HEAD = PlannedHead(name="mine", fingerprint="0" * 64, location="/h")
# Another plan, what the message must say of it, and the models whose vectors can be reused.
OTHERS: list[tuple[RunPlan, str, set[str]]] = [
    (replace(PLAN, input_digest="f" * 64), r"input was in\.fa \(cccccccccccc\), now in\.fa \(ffff", set()),
    (replace(PLAN, chunk_length=300), r"chunk_length \(--chunk-length\) was 500, now 300", set()),
    (replace(PLAN, shards=PLAN.shards[:1]), r"cut into 2 shards \(--shard-seconds\), now 1", set()),
    (replace(PLAN, virnuc_version="2.0"), r"virnuc_version was 1\.0, now 2\.0", set()),
    (replace(PLAN, embeddings="none"), r"\(--embeddings\) was float32, now none", BOTH),
    (replace(PLAN, head=OTHER_HEAD), r"head \(--head\) was tiny-500 \(d{12}\), now mine \(0{12}\)", BOTH),
    (
        with_esm2(name="3B", weights_fingerprint="9" * 64),
        r"esm2 model was tiny \(a{12}\), now 3B \(9{12}\)\.",
        {"dnabert_s"},
    ),
    (replace(PLAN, models=PLAN.models[:1]), r"esm2 model was tiny \(a{12}\), now none", {"dnabert_s"}),
    *(
        (with_esm2(**{field: value}), rf"esm2\.{field} \(--{flag}\) was {was}, now {value}", {"dnabert_s"})
        for field, flag, was, value in (
            ("repr_layer", "repr-layer", 4, 2),
            ("precision", "precision", "fp32", "fp16"),
            ("attention", "attention", "sdpa", "reference"),
            ("compile_mode", "compile-mode", "none", "default"),
        )
    ),
    *(
        (with_dna(**{field: value}), rf"dnabert_s\.{field} \(--{flag}\) was {was}, now {value}", {"esm2"})
        for field, flag, was, value in (
            ("token_budget", "token-budget", 4096, 1),
            ("precision", "dnabert-precision", "fp32", "fp16"),
            ("engine", "dnabert-engine", "packed", "reference"),
        )
    ),
]


def refusal(other: RunPlan, existing: RunPlan = PLAN, folder: RunFolder = FOLDER) -> str:
    with pytest.raises(MismatchError) as caught:
        require_same_plan(existing, other, folder)
    return str(caught.value)


@pytest.mark.parametrize(("other", "message", "families"), OTHERS)
def test_everything_that_decides_the_numbers_counts(other: RunPlan, message: str, families: set[str]) -> None:
    assert other.fingerprint != PLAN.fingerprint
    message = f"^out/run holds a run made with something else: .*{message}"
    with pytest.raises(MismatchError, match=message) as caught:
        require_same_plan(PLAN, other, FOLDER)
    for words in ("out/run/plan.json", "the old setting", "--force"):
        assert words in str(caught.value)
    can_be_moved = not any(words in message for words in ("input was", "chunk_length", "cut into"))
    assert ("`virnuc reprocess out/run`" in str(caught.value)) is can_be_moved
    assert ("but not to other input, chunks or shards" in str(caught.value)) is not can_be_moved
    assert reused_families(PLAN, other) == families


def test_rounded_vectors_are_not_reused() -> None:
    for embeddings in ("float16", "none"):
        assert reused_families(replace(PLAN, embeddings=embeddings), PLAN) == set()


def test_names_and_places_do_not_count() -> None:
    moved = replace(
        PLAN,
        inputs=(InputFile(name="other.fa", size=11, sha256="e" * 64),),
        models=(model("dnabert_s", name="x", location="/y"), model("esm2", location="/z")),
        head=PlannedHead(name="other", fingerprint="d" * 64, location="/elsewhere"),
    )
    assert moved.fingerprint == PLAN.fingerprint
    require_same_plan(PLAN, moved, FOLDER)


@pytest.mark.parametrize(
    "cause",
    [
        {
            "weights_fingerprint": "9" * 64,
            "spec": replace(PLAN.models[1].spec, num_layers=36),
            "repr_layer": 36,
        },
        {"precision": "fp16", "attention": "triton", "compile_mode": "default"},
    ],
)
def test_a_cause_is_not_buried_by_what_follows_from_it(cause: dict[str, object]) -> None:
    message = refusal(replace(with_esm2(token_budget=7, **cause), shards=()))
    for word in ("repr_layer", "spec", "token_budget", "shards:", "attention", "compile_mode"):
        assert word not in message


def test_an_embed_run_cannot_be_reprocessed() -> None:
    message = refusal(replace(PLAN, kind="embed", embeddings="float16"), replace(PLAN, kind="embed"))
    assert "--force" in message
    assert "reprocess" not in message


def test_a_move_to_something_else_has_its_own_ways_out(tmp_path: Path) -> None:
    following = RunFolder(tmp_path).next
    following.root.mkdir()
    following.link_frames()
    message = refusal(replace(PLAN, head=OTHER_HEAD), folder=following)
    assert "throw away what was begun with it: --force" in message
