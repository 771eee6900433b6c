"""`virnuc inspect`: identifies files and folders, and detects every changed byte."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.made_models import ESM2, MadeModels, MadeRun, plan_run
from virnuc_core.errors import InputError
from virnuc_core.inference.plan import write_plan
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.run_json import file_record
from virnuc_core.run_folder import RunFolder

RESULTS = [path.name for path in RunFolder(Path()).results]


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    copy.page.write_text("<!DOCTYPE html>")
    copy.multiqc.write_text("{}")
    results = [path for path in copy.results if path != copy.report]
    copy.report.write_text(json.dumps({"files": [file_record(path) for path in results]}))
    return copy


def test_an_intact_run(folder: RunFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))}
    found = inspect_path(folder.root)
    assert {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))} == before
    total = len(list(folder.shards.iterdir()))
    assert (found.kind, found.is_intact) == ("run folder", True)
    assert found.facts["shards"] == f"{total} of {total} intact"
    assert found.summary.startswith(f"{folder.root}: run folder, intact\n  kind: predict\n")
    assert found.document["intact"] is True
    assert found.document["facts"] == found.facts


def test_files_and_folders_are_called_by_their_name(
    folder: RunFolder, made_models: MadeModels, tmp_path: Path
) -> None:
    contents = {
        "letter.txt": b"Dear Sir or Madam,",
        "empty": b"",
        "plan.json": folder.plan.read_bytes(),
        "cut.pt": ESM2.read_bytes()[:1000],
        "without_suffix": b"\x80\x02}",
        "cut.h5": folder.embeddings.read_bytes()[:-1],
        "in.fa": b">a\nACGT\n>b\nMLEF\n",
        "reads.fq.gz": gzip.compress(b"@a\nACGT\n+\nFFFF\n"),
        "cut.fa.gz": gzip.compress(b">a\nACGT\n" * 99)[:-9],
        "odd.fq": b"@a\nACGT\n+\nFF\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["dna"] = np.zeros(3)
    intact = {
        folder.root: "run folder",
        folder.frames: "frame store",
        folder.shard(0): "shard",
        folder.embeddings: "embeddings file",
        ESM2: "checkpoint",
        made_models.dnabert: "checkpoint",
        made_models.head: "head",
        tmp_path / "in.fa": "sequence file",
        tmp_path / "reads.fq.gz": "sequence file",
    }
    not_intact = {
        **dict.fromkeys(["letter.txt", "empty", "plan.json"], "unknown file"),
        **dict.fromkeys(["cut.pt", "without_suffix", "folder"], "checkpoint"),
        **dict.fromkeys(["cut.fa.gz", "odd.fq"], "sequence file"),
        "foreign.h5": "HDF5 file not written by virnuc",
        "cut.h5": "damaged HDF5 file",
    }
    for path, kind in intact.items():
        found = inspect_path(path)
        assert (found.kind, found.problems) == (kind, ())
        assert found.summary.startswith(f"{path}: {kind}, intact\n")
        assert found.facts
    assert inspect_path(tmp_path / "in.fa").facts == {"records": "2, 1 of them DNA", "letters": "8"}
    for name, kind in not_intact.items():
        found = inspect_path(tmp_path / name)
        assert (found.kind, found.is_intact, len(found.problems)) == (kind, False, 1)
        assert ("is not a shard, embeddings file" in found.problems[0]) == (
            kind == "unknown file" or "HDF5" in kind
        )
    with pytest.raises(InputError, match="does not exist"):
        inspect_path(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["plan.json", "frames/protein.bin", "shards/shard_00001.h5", *RESULTS])
def test_one_other_byte_is_found_where_it_is(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    content = bytearray(path.read_bytes())
    content[3 if path == folder.report else len(content) // 2] ^= 0x10
    path.write_bytes(content)
    blamed = path.parent if path.parent == folder.frames else path
    [problem] = inspect_path(folder.root).problems
    assert str(blamed) in problem


def test_what_is_missing_is_named(folder: RunFolder) -> None:
    total = len(list(folder.shards.iterdir()))
    for index in (0, 1):
        folder.shard(index).unlink()
    shutil.rmtree(folder.frames)
    folder.contigs.unlink()
    found = inspect_path(folder.root)
    assert found.facts["shards"] == f"{total - 2} of {total} intact"
    store, shards, contigs = found.problems
    assert str(folder.frames) in store
    assert f"2 of {total} shards are not computed yet" in shards
    assert f"{folder.contigs} is missing" in contigs
    folder.report.unlink()
    assert "the run is not finished: run the same command again" in inspect_path(folder.root).problems[-1]


def test_what_is_of_another_run_is_found(
    folder: RunFolder, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    other = plan_run(tmp_path / "other", contigs, made_models.config(repr_layer=2))
    other.compute()
    shutil.copy(other.folder.shard(0), folder.shard(0))
    [problem] = inspect_path(folder.root).problems
    assert "belongs to another run" in problem
    write_plan(folder.plan, replace(other.plan, input_digest="0" * 64))
    assert "does not contain the sequences of the run's plan" in inspect_path(folder.root).problems[0]


def test_an_embed_run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    out = tmp_path / "vectors.h5"
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run = plan_run(tmp_path / "vectors.h5.run", contigs, config, kind="embed")
    run.compute()
    aggregate(run.folder, run.plan, run.store, out)
    run.folder.report.write_text(json.dumps({"files": [file_record(out)]}))
    assert inspect_path(run.folder.root).is_intact
    run.folder.report.write_text(json.dumps({"files": [file_record(out) | {"attributes_sha256": "0"}]}))
    assert "was modified after run.json was written" in inspect_path(run.folder.root).problems[0]
    with h5py.File(out, "r+") as file:
        file["embeddings"][5] = 0
    for path in (run.folder.root, out):
        assert "the checksum of 'embeddings' does not match" in inspect_path(path).problems[0]


@pytest.mark.parametrize("content", ["", "{}", "[]", "not JSON", '{"files": [{}]}'])
def test_a_report_without_records(folder: RunFolder, content: str) -> None:
    folder.report.write_text(content)
    [problem] = inspect_path(folder.root).problems
    assert "does not list the result files of the run" in problem
