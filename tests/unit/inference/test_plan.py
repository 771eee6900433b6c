"""The plan of a run: written once, read back, compared, and what can be reused of one for another."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability.hostile import hostile_json
from tests.made_plans import PLAN, model
from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, HostError, MismatchError
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
from virnuc_core.versions import series

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


def with_index(digest: str) -> RunPlan:
    assert PLAN.head is not None
    return replace(PLAN, head=replace(PLAN.head, index=digest))


LARGE = {"name": "3B", "weights_fingerprint": "9" * 64}
OTHER_HEAD = PlannedHead(name="mine", fingerprint="0" * 64, location="/h")


@pytest.mark.parametrize(
    ("other", "message", "families"),
    [
        (replace(PLAN, input_digest="f" * 64), r"input was in\.fa \(c{12}\), now in\.fa \(ffff", set()),
        (replace(PLAN, chunk_length=300), r"chunk_length \(--chunk-length\) was 500, now 300", set()),
        (replace(PLAN, frames="longest"), r"frames \(--head\) were open .*, now longest stop-free", set()),
        (replace(PLAN, shards=PLAN.shards[:1]), r"cut into 2 shards \(--shard-seconds\), now 1", set()),
        (replace(PLAN, virnuc_version="99.0.1"), r"virnuc_version was \d+\.\d+, now 99\.0", set()),
        (replace(PLAN, embeddings="none"), r"\(--embeddings\) was float32, now none", BOTH),
        (
            replace(PLAN, head=OTHER_HEAD),
            r"head \(--head\) was head_500.pth \(d{12}\), now mine \(0{12}\)",
            BOTH,
        ),
        (with_index("e" * 64), r"index of genomes beside head head_500.pth was none, now e{12}\.", BOTH),
        (replace(PLAN, models=PLAN.models[:1]), r"esm2 model was tiny \(a{12}\), now none", {"dnabert_s"}),
        (with_esm2(**LARGE), r"esm2 model was tiny \(a{12}\), now 3B \(9{12}\)\.", {"dnabert_s"}),
        (with_esm2(repr_layer=2), r"esm2\.repr_layer \(--repr-layer\) was 4, now 2", {"dnabert_s"}),
        (with_esm2(precision="fp16"), r"esm2\.precision \(--precision\) was fp32, now fp16", {"dnabert_s"}),
        (with_esm2(attention="reference"), r"\(--attention\) was sdpa, now reference", {"dnabert_s"}),
        (with_esm2(compiled=True), r"compiled was False, now True", {"dnabert_s"}),
        (with_dna(token_budget=1), r"dnabert_s\.token_budget \(--token-budget\) was 4096, now 1", {"esm2"}),
        (with_dna(precision="fp16"), r"precision \(--dnabert-precision\) was fp32, now fp16", {"esm2"}),
        (with_dna(engine="reference"), r"\(--dnabert-engine\) was packed, now reference", {"esm2"}),
    ],
)
def test_everything_that_decides_the_numbers_counts(other: RunPlan, message: str, families: set[str]) -> None:
    assert other.fingerprint != PLAN.fingerprint
    message = f"^out/run holds a run made with something else: .*{message}"
    with pytest.raises(MismatchError, match=message) as caught:
        require_same_plan(PLAN, other, FOLDER)
    for words in ("out/run/plan.json", "the old setting", "--force"):
        assert words in str(caught.value)
    can_be_moved = not any(words in message for words in ("input was", "chunk_length", "frames", "cut into"))
    assert ("`virnuc reprocess out/run`" in str(caught.value)) is can_be_moved
    assert ("but not to other input, chunks, frames or shards" in str(caught.value)) is not can_be_moved
    assert reused_families(PLAN, other) == families


def test_a_patch_release_continues_a_run_and_another_series_is_refused() -> None:
    patched = replace(PLAN, virnuc_version=f"{series(__version__)}.99")
    assert patched.fingerprint == PLAN.fingerprint
    assert reused_families(PLAN, patched) == BOTH
    require_same_plan(PLAN, patched, FOLDER)
    patched.require_own_series()
    message = (
        rf"planned by virnuc 99\.0, and {socket.gethostname()} has {__version__}, .*the same version on every"
    )
    with pytest.raises(HostError, match=message):
        replace(PLAN, virnuc_version="99.0").require_own_series()


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


CONSEQUENCES = ("repr_layer", "spec", "token_budget", "shards:", "attention")
DEEPER = {**LARGE, "spec": replace(PLAN.models[1].spec, num_layers=36), "repr_layer": 36}
IN_HALF = {"precision": "fp16", "attention": "triton"}
EMBED = replace(PLAN, kind="embed")
HALF_EMBED = replace(EMBED, embeddings="float16")


@pytest.mark.parametrize(
    ("existing", "other", "said", "unsaid"),
    [
        (PLAN, replace(with_esm2(token_budget=7, **DEEPER), shards=()), "now 3B", CONSEQUENCES),
        (PLAN, replace(with_esm2(token_budget=7, **IN_HALF), shards=()), "now fp16", CONSEQUENCES),
        (EMBED, HALF_EMBED, "--force", ("reprocess",)),
        (with_index("e" * 64), replace(PLAN, head=OTHER_HEAD), "now mine", ("index",)),
    ],
    ids=["other weights", "other precision", "of an embed run", "other head"],
)
def test_a_refusal_names_the_cause_and_ways_out_that_there_are(
    existing: RunPlan, other: RunPlan, said: str, unsaid: tuple[str, ...]
) -> None:
    with pytest.raises(MismatchError, match=said) as caught:
        require_same_plan(existing, other, FOLDER)
    assert [words for words in unsaid if words in str(caught.value)] == []


def test_a_move_to_something_else_has_its_own_ways_out(tmp_path: Path) -> None:
    following = RunFolder(tmp_path).next
    following.root.mkdir()
    following.link_frames()
    with pytest.raises(MismatchError, match="throw away what was begun with it: --force"):
        require_same_plan(PLAN, replace(PLAN, head=OTHER_HEAD), following)
