"""The plan of a run: written once, read back, compared."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_hostile import hostile_json
from tests.made_plans import PLAN, model
from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, HostError, MismatchError
from virnuc_core.inference.plan import (
    PlannedHead,
    RunPlan,
    Shard,
    read_plan,
    require_same_plan,
    write_plan,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import InputFile
from virnuc_core.versions import series

FOLDER = RunFolder(Path("out/run"))


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
        ("chunk_length", 300, "was modified"),
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
    with pytest.raises(DamagedFileError, match=r"plan .*plan\.json cannot be read .*another --out"):
        read_plan(path)


@pytest.mark.parametrize(
    "bounds",
    [[(0, 0, 3), (1, 4, 9)], [(0, 0, 5), (1, 4, 9)], [(0, 0, 5), (1, 5, 4)], [(1, 0, 9)], [(0, 1, 9)]],
)
def test_shards_that_do_not_follow_one_another(path: Path, bounds: list[tuple[int, int, int]]) -> None:
    shards = tuple(Shard(index=index, begin=begin, end=end, cost=1.0) for index, begin, end in bounds)
    write_plan(path, replace(PLAN, shards=shards))
    with pytest.raises(DamagedFileError, match="are not consecutive"):
        read_plan(path)


def with_dna(**changes: object) -> RunPlan:
    return replace(PLAN, models=(model("dnabert_s", **changes), PLAN.models[1]))


def with_esm2(**changes: object) -> RunPlan:
    return replace(PLAN, models=(PLAN.models[0], model("esm2", **changes)))


LARGE = {"name": "3B", "weights_fingerprint": "9" * 64}
DEEPER = {**LARGE, "spec": replace(PLAN.models[1].spec, num_layers=36), "repr_layer": 36}
OTHER_HEAD = PlannedHead(name="mine", fingerprint="0" * 64, location="/h")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            replace(PLAN, input_digest="f" * 64),
            f"input_digest: was in.fa ({'c' * 12}), now in.fa ({'f' * 12})",
        ),
        (replace(PLAN, kind="embed"), "kind: was predict, now embed"),
        (replace(PLAN, chunk_length=300), "chunk_length: was 500, now 300"),
        (replace(PLAN, min_length=300), "min_length: was none, now 300"),
        (replace(PLAN, frames="longest"), "frames: was open, now longest"),
        (replace(PLAN, shards=PLAN.shards[:1]), "shards: was 2 shards, now 1 shards"),
        (replace(PLAN, virnuc_version="99.0.1"), f"virnuc_version: was {series(__version__)}, now 99.0"),
        (replace(PLAN, embeddings="none"), "embeddings: was float32, now none"),
        (replace(PLAN, head=OTHER_HEAD), f"head: was head_500.pth ({'d' * 12}), now mine ({'0' * 12})"),
        (replace(PLAN, head=None), f"head: was head_500.pth ({'d' * 12}), now none"),
        (replace(PLAN, models=PLAN.models[:1]), f"esm2.weights_fingerprint: was tiny ({'a' * 12}), now none"),
        (with_esm2(**LARGE), f"esm2.weights_fingerprint: was tiny ({'a' * 12}), now 3B ({'9' * 12})"),
        (with_esm2(**DEEPER), f"esm2.weights_fingerprint: was tiny ({'a' * 12}), now 3B ({'9' * 12})"),
        (with_esm2(repr_layer=2), "esm2.repr_layer: was 4, now 2"),
        (with_esm2(precision="fp16"), "esm2.precision: was fp32, now fp16"),
        (with_esm2(attention="reference"), "esm2.attention: was sdpa, now reference"),
        (with_esm2(compiled=True), "esm2.compiled: was False, now True"),
        (with_dna(token_budget=1), "dnabert_s.token_budget: was 4096, now 1"),
        (with_dna(engine="reference"), "dnabert_s.engine: was packed, now reference"),
    ],
)
def test_everything_that_decides_the_numbers_counts(other: RunPlan, line: str) -> None:
    assert other.fingerprint != PLAN.fingerprint
    with pytest.raises(MismatchError) as caught:
        require_same_plan(PLAN, other, FOLDER)
    first, *lines, hint = str(caught.value).splitlines()
    assert first == "out/run contains a run with different settings:"
    assert lines == [f"  {line}"]
    for words in ("the old settings", "out/run/plan.json", "another --out", "--force"):
        assert words in hint


def test_every_difference_has_a_line_and_switches_are_named() -> None:
    other = replace(
        with_esm2(precision="fp32", token_budget=1),
        chunk_length=300,
        switches=("VIRNUC_DISABLE_PACKING",),
    )
    with pytest.raises(MismatchError) as caught:
        require_same_plan(PLAN, other, FOLDER)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "chunk_length: was 500, now 300",
        "esm2.token_budget: was 4096, now 1",
        "switches: was none, now VIRNUC_DISABLE_PACKING",
    ]
    # A switch that changes nothing does not matter.
    require_same_plan(PLAN, replace(PLAN, switches=("VIRNUC_DISABLE_FP16",)), FOLDER)


def test_a_patch_release_continues_a_run_and_another_series_is_refused() -> None:
    patched = replace(PLAN, virnuc_version=f"{series(__version__)}.99")
    assert patched.fingerprint == PLAN.fingerprint
    require_same_plan(PLAN, patched, FOLDER)
    patched.require_own_series()
    message = (
        rf"planned by virnuc 99\.0, but {socket.gethostname()} has {__version__}, .*the same version on all"
    )
    with pytest.raises(HostError, match=message):
        replace(PLAN, virnuc_version="99.0").require_own_series()


def test_names_and_places_do_not_count() -> None:
    moved = replace(
        PLAN,
        inputs=(InputFile(name="other.fa", size=11, sha256="e" * 64),),
        models=(model("dnabert_s", name="x", location="/y"), model("esm2", location="/z")),
        head=PlannedHead(name="other", fingerprint="d" * 64, location="/elsewhere"),
    )
    assert moved.fingerprint == PLAN.fingerprint
    require_same_plan(PLAN, moved, FOLDER)
