"""`virnuc inspect` and `virnuc fsck`: identify files and folders, and detect every changed byte."""

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.made_models import ESM2, MadeModels, MadeRun, plan_run
from virnuc_core.checked_hdf5 import array_sha256, read_attributes, write_attributes
from virnuc_core.errors import InputError
from virnuc_core.inference.plan import read_plan, write_plan
from virnuc_core.results import writers
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.integrity import Finding, inspect_path
from virnuc_core.results.run_json import records_of
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder

NOT_AS_IN = "are not as in shard_00000.h5, the first is row 3 (contig"
NOT_GIVEN = "is not what the shards give"
RESULTS = [path.name for path in RunFolder(Path()).results]


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    copy.page.write_text("<!DOCTYPE html>")
    copy.multiqc.write_text("{}")
    write_records(copy)
    return copy


def write_records(folder: RunFolder) -> None:
    results = [path for path in folder.results if path != folder.report]
    folder.report.write_text(json.dumps({"files": records_of(results)}))


def bad(path: Path) -> dict[Path, Finding]:
    """By path, what is not whole."""
    return {
        found.path: found for found in inspect_path(path, thorough=True).findings if found.state != "whole"
    }


def states(path: Path) -> dict[Path, str]:
    return {where: found.state for where, found in bad(path).items()}


def change_dataset(path: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes values and makes all checksums valid again."""
    with h5py.File(path, "r+") as file:
        values, attributes = file[name][()], read_attributes(file)
        change(values)
        file[name][...] = values
        write_attributes(file, {**attributes, f"{name}_sha256": array_sha256(values)})


def test_an_intact_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(writers, "_SORTED_BYTES", 5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))}
    check = inspect_path(folder.root, thorough=True)
    assert {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))} == before
    names = {"plan.json", "frames", *RESULTS, *(path.name for path in folder.shards.iterdir())}
    assert {(found.path.name, found.state) for found in check.findings} == {(name, "whole") for name in names}
    assert check.document["whole"] is True
    assert check.document["findings"][0] == {"path": str(folder.plan), "state": "whole", "message": ""}
    assert check.summary == (
        f"{folder.root}: run folder, whole\n  whole: {len(names)} of {len(names)} files and folders"
    )


@pytest.mark.parametrize("thorough", [False, True])
def test_files_and_folders_are_called_by_their_name(
    folder: RunFolder, made_models: MadeModels, tmp_path: Path, thorough: bool
) -> None:
    contents = {
        "letter.txt": b"Dear Sir or Madam,",
        "in.fa": b">a\nACGT\n",
        "empty": b"",
        "plan.json": folder.plan.read_bytes(),
        "cut.pt": ESM2.read_bytes()[:1000],
        "without_suffix": b"\x80\x02}",
        "cut.h5": folder.embeddings.read_bytes()[:-1],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["dna"] = np.zeros(3)
    whole = {
        folder.root: "run folder",
        folder.frames: "frame store",
        folder.shard(0): "shard",
        folder.embeddings: "embeddings file",
        ESM2: "checkpoint",
        made_models.dnabert: "checkpoint",
        made_models.head: "head",
    }
    not_whole = {
        **dict.fromkeys(["letter.txt", "in.fa", "empty", "plan.json", "arrays.npz"], "unknown file"),
        **dict.fromkeys(["cut.pt", "without_suffix", "folder"], "checkpoint"),
        "foreign.h5": "HDF5 file that virnuc did not write",
        "cut.h5": "damaged HDF5 file",
    }
    for path, kind in whole.items():
        found = inspect_path(path, thorough=thorough)
        assert (found.kind, found.is_complete, found.problems) == (kind, True, ())
        assert found.summary.startswith(f"{path}: {kind}, whole\n")
        assert thorough or found.document["facts"] == dict(found.facts) != {}
    for name, kind in not_whole.items():
        found = inspect_path(tmp_path / name, thorough=thorough)
        assert (found.kind, found.is_complete, len(found.problems)) == (kind, False, 1)
        advice = "is no shard, embeddings file, model checkpoint or classifier head"
        assert (advice in found.problems[0]) == (kind == "unknown file")
    with pytest.raises(InputError, match="nothing at"):
        inspect_path(tmp_path / "nowhere", thorough=thorough)


@pytest.mark.parametrize("name", ["plan.json", "frames/protein.bin", "shards/shard_00001.h5", *RESULTS])
def test_one_other_byte_is_found_where_it_is(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    content = bytearray(path.read_bytes())
    content[3 if path == folder.report else len(content) // 2] ^= 0x10
    path.write_bytes(content)
    blamed = path.parent if path.parent == folder.frames else path
    found = inspect_path(folder.root)
    assert (blamed, "damaged") in {(one.path, one.state) for one in found.findings}
    assert not found.is_complete
    assert any(str(blamed) in problem for problem in found.problems)


def test_what_is_missing_is_named(folder: RunFolder) -> None:
    total = len(list(folder.shards.iterdir()))
    for index in (0, 1):
        folder.shard(index).unlink()
    quick = inspect_path(folder.root)
    assert ("shards", f"{total - 2} of {total} whole") in quick.facts
    assert f"  problem: 2 of {total} shards are still to be computed" in quick.summary
    missing = [folder.predictions, folder.contigs_parquet, folder.embeddings, folder.report]
    for path in missing:
        path.unlink()
    shutil.rmtree(folder.frames)
    assert states(folder.root) == dict.fromkeys([folder.shards, *missing, folder.frames], "missing")


def swap_rows(values: np.ndarray) -> None:
    values[[3, 40]] = values[[40, 3]]


def cut_last_record(path: Path) -> None:
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: text.rindex(b">")]))


def reverse_lines(path: Path) -> None:
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, *reversed(lines)]))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(
            (
                "embeddings.h5",
                partial(change_dataset, name=name, change=swap_rows),
                f"rows of {name!r} {NOT_AS_IN}",
            )
            for name in ("dna", "protein", "scores")
        ),
        ("contigs.tsv", reverse_lines, NOT_GIVEN),
        ("regions.fa.gz", cut_last_record, NOT_GIVEN),
        ("contigs.parquet", lambda path: pq.write_table(pq.read_table(path).slice(1), path), NOT_GIVEN),
    ],
)
def test_changed_results_are_found_although_all_checksums_are_right(
    folder: RunFolder, name: str, change: Callable[[Path], None], message: str
) -> None:
    path = folder.root / name
    change(path)
    write_records(folder)
    assert states(folder.root) == {path: "damaged"}
    assert message in bad(folder.root)[path].message
    assert inspect_path(folder.root).is_complete


def test_other_compressors_another_threshold_and_leftovers_are_no_damage(
    folder: RunFolder, finished_run: MadeRun
) -> None:
    write_plan(folder.plan, replace(read_plan(folder.plan), threshold=0.503))
    assert folder.contigs in bad(folder.root)
    write_tables(folder, finished_run.store, 0.503)
    text = gzip.decompress(folder.viral_contigs.read_bytes())
    folder.viral_contigs.write_bytes(gzip.compress(text, 1))
    table = pq.read_table(folder.contigs_parquet)
    pq.write_table(table, folder.contigs_parquet, compression="snappy")
    write_records(folder)
    left = [
        folder.root / ".embeddings.h5.tmp",
        folder.shards / ".shard_00000.h5.0123456789abcdef.tmp",
        folder.shards / "shard_00000.h5.damaged-1",
    ]
    for path in left:
        path.touch()
    assert inspect_path(folder.root, thorough=True).is_complete
    assert states(folder.root) == dict.fromkeys(left, "left over")


def test_what_is_of_another_run_is_foreign(
    folder: RunFolder, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    other = plan_run(tmp_path / "other", contigs, made_models.config(repr_layer=2))
    other.compute()
    aggregate(other.folder, other.plan, other.store)
    messages = {
        folder.shard(0): "plan_fingerprint is ",
        folder.shards / "shard_00077.h5": "is not of this run",
        folder.embeddings: "protein_repr_layer is 2 in the file and 4 in the plan",
    }
    sources = (other.folder.shard(0), other.folder.shard(1), other.folder.embeddings)
    for source, path in zip(sources, messages, strict=True):
        assert not bad(source)
        shutil.copy(source, path)
    write_records(folder)
    for path, message in messages.items():
        found = bad(folder.root)[path]
        assert found.state == "foreign"
        assert message in found.message
    for path in (folder.shard(0), folder.embeddings):
        assert states(path) == {path: "foreign"}
    write_plan(folder.plan, replace(other.plan, input_digest="0" * 64))
    assert "plan_fingerprint is" in bad(folder.embeddings)[folder.embeddings].message


def test_an_embed_run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    out = tmp_path / "vectors.h5"
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run = plan_run(tmp_path / "vectors.h5.run", contigs, config, kind="embed")
    run.compute()
    aggregate(run.folder, run.plan, run.store, out)
    run.folder.report.write_text(json.dumps({"files": records_of([out])}))
    assert not bad(run.folder.root)
    change_dataset(out, "embeddings", lambda values: values[5].fill(0))
    assert states(run.folder.root)[out] == "damaged"
    assert not bad(out), "alone, it cannot be told"


@pytest.mark.parametrize("content", ["", "{}", "[]", "not JSON", '{"files": [{"name": "contigs.tsv"}]}'])
def test_a_report_without_records(folder: RunFolder, content: str) -> None:
    folder.report.write_text(content)
    [problem] = inspect_path(folder.root).problems
    assert "does not say what the result files of the run are" in problem
