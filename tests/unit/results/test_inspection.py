"""What things are, and whether they are whole."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.made_models import ESM2, MadeModels, MadeRun
from virnuc_core.errors import InputError
from virnuc_core.results.integrity import inspect_path
from virnuc_core.results.run_json import records_of
from virnuc_core.run_folder import RunFolder


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    copy.page.write_text("<!DOCTYPE html>")
    results = [path for path in copy.results if path != copy.report]
    copy.report.write_text(json.dumps({"files": records_of(results)}))
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
        assert (found.kind, found.is_complete, found.problems) == (kind, True, ())
        assert found.facts
        assert found.document["whole"] is True
        assert found.summary.startswith(f"{path}: {kind}, whole\n")


def test_an_unfinished_run(folder: RunFolder) -> None:
    folder.shard(1).unlink()
    folder.contigs.unlink()
    found = inspect_path(folder.root)
    assert not found.is_complete
    total = len(list(folder.shards.iterdir())) + 1
    assert ("shards", f"{total - 1} of {total} whole") in found.facts
    assert [problem for problem in found.problems if "contigs.tsv is missing" in problem]
    assert f"  problem: 1 of {total} shards are still to be computed" in found.summary


@pytest.mark.parametrize(
    "name", ["shards/shard_00000.h5", "embeddings.h5", "plan.json", "frames/protein.bin"]
)
def test_a_damaged_part_of_a_run(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert not inspect_path(folder.root).is_complete


def test_a_damaged_shard(folder: RunFolder) -> None:
    path = folder.shard(0)
    path.write_bytes(path.read_bytes()[:-1])
    assert not inspect_path(path).is_complete


def test_what_virnuc_does_not_know(tmp_path: Path) -> None:
    assert not inspect_path(tmp_path).is_complete
    with pytest.raises(InputError, match="nothing at"):
        inspect_path(tmp_path / "nowhere")


def test_files_of_other_kinds_are_not_called_checkpoints(folder: RunFolder, tmp_path: Path) -> None:
    contents = {
        "letter.txt": b"Dear Sir or Madam,",
        "in.fa": b">a\nACGT\n",
        "empty": b"",
        "plan.json": folder.plan.read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    for name in (*contents, "arrays.npz"):
        found = inspect_path(tmp_path / name)
        assert (found.kind, found.is_complete) == ("unknown file", False)
        assert "is no shard, embeddings file, model checkpoint or classifier head" in found.problems[0]


def test_a_damaged_checkpoint_is_still_one(tmp_path: Path) -> None:
    for name, content in (("cut.pt", ESM2.read_bytes()[:1000]), ("without_suffix", b"\x80\x02}")):
        (tmp_path / name).write_bytes(content)
        found = inspect_path(tmp_path / name)
        assert (found.kind, found.is_complete) == ("checkpoint", False)


def test_hdf5_files_of_others_and_damaged_ones(folder: RunFolder, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["dna"] = np.zeros(3)
    foreign = inspect_path(tmp_path / "foreign.h5")
    assert (foreign.kind, foreign.is_complete) == ("HDF5 file that virnuc did not write", False)
    path = folder.embeddings
    path.write_bytes(path.read_bytes()[:-1])
    cut = inspect_path(path)
    assert (cut.kind, cut.is_complete) == ("damaged HDF5 file", False)


@pytest.mark.parametrize(
    "name", ["predictions", "contigs", "prediction_results", "highest_score", "rejected"]
)
def test_a_table_that_lost_its_end(folder: RunFolder, name: str) -> None:
    table: Path = getattr(folder, name)
    table.write_bytes(table.read_bytes()[:-1])
    assert [
        problem for problem in inspect_path(folder.root).problems if f"{table} is not as it was" in problem
    ]


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "not JSON", '{"files": {}}', '{"files": [{"name": "contigs.tsv"}]}']
)
def test_a_report_without_records(folder: RunFolder, content: str) -> None:
    folder.report.write_text(content)
    problems = inspect_path(folder.root).problems
    assert [problem for problem in problems if "does not say what the result files of the run are" in problem]
