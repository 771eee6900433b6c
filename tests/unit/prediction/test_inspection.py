"""What things are, and whether they are whole."""

import shutil
from pathlib import Path

import pytest

from tests.made_models import ESM2, MadeModels, MadeRun
from virnuc_core.errors import InputError
from virnuc_core.prediction.inspection import inspect_path
from virnuc_core.run_plan import RunFolder


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    copy.report.write_text("{}\n")
    return copy


def test_whole_things(folder: RunFolder, made_models: MadeModels) -> None:
    kinds = {
        folder.root: "run folder",
        folder.frames: "frame store",
        folder.shard(0): "shard",
        folder.embeddings: "embeddings file",
        ESM2: "checkpoint",
        made_models.dnabert: "checkpoint",
        made_models.head: "head",
    }
    for path, kind in kinds.items():
        found = inspect_path(path)
        assert (found.kind, found.is_whole, found.problems) == (kind, True, ())
        assert found.facts
        assert found.document["whole"] is True
        assert found.summary.startswith(f"{path}: {kind}, whole\n")


def test_an_unfinished_run(folder: RunFolder) -> None:
    folder.shard(1).unlink()
    folder.contigs.unlink()
    found = inspect_path(folder.root)
    assert not found.is_whole
    total = len(list(folder.shards.iterdir())) + 1
    assert ("shards", f"{total - 1} of {total} whole") in found.facts
    assert [problem for problem in found.problems if "contigs.tsv is missing" in problem]
    assert "  problem: 1 shards are still to be computed" in found.summary


@pytest.mark.parametrize(
    "name", ["shards/shard_00000.h5", "embeddings.h5", "plan.json", "frames/protein.bin"]
)
def test_a_damaged_part_of_a_run(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert not inspect_path(folder.root).is_whole


def test_a_damaged_shard(folder: RunFolder) -> None:
    path = folder.shard(0)
    path.write_bytes(path.read_bytes()[:-1])
    assert not inspect_path(path).is_whole


def test_what_virnuc_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear Sir or Madam,")
    for path in (tmp_path, tmp_path / "letter.txt"):
        found = inspect_path(path)
        assert not found.is_whole
        assert found.problems
    with pytest.raises(InputError, match="nothing at"):
        inspect_path(tmp_path / "nowhere")
