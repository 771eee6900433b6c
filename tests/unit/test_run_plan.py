"""The plan of a run: written once, read back, and compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_plans import PLAN
from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.plan import read_plan, write_plan
from virnuc_core.run_folder import RunFolder


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
