"""`virnuc inspect` and `virnuc fsck`: identify files and folders, and detect every changed byte."""

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.made_models import ESM2, WIDTH, MadeModels, MadeRun, make_head, plan_run
from tests.made_moves import begin_move
from virnuc_core.checked_hdf5 import array_sha256, read_attributes, write_attributes
from virnuc_core.errors import InputError
from virnuc_core.inference.plan import read_plan, write_plan
from virnuc_core.results import writers
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.integrity import Finding, inspect_path
from virnuc_core.results.run_json import records_of
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder

RESULTS = [path.name for path in RunFolder(Path()).results]


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    copy.page.write_text("<!DOCTYPE html>")
    write_records(copy)
    return copy


def write_records(folder: RunFolder) -> None:
    results = [path for path in folder.results if path != folder.report]
    folder.report.write_text(json.dumps({"files": records_of(results)}))


def bad(path: Path) -> list[Finding]:
    return [found for found in inspect_path(path, thorough=True).findings if found.state != "whole"]


def states(path: Path) -> set[tuple[Path, str]]:
    return {(found.path, found.state) for found in bad(path)}


def is_intact(path: Path) -> bool:
    return inspect_path(path, thorough=True).is_complete


def change_dataset(path: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes values and makes all checksums valid again."""
    with h5py.File(path, "r+") as file:
        values, attributes = file[name][()], read_attributes(file)
        change(values)
        file[name][...] = values
        write_attributes(file, {**attributes, f"{name}_sha256": array_sha256(values)})


def test_an_intact_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, made_models: MadeModels, tmp_path: Path
) -> None:
    monkeypatch.setattr(writers, "_SORTED_IN_MEMORY", 5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))}
    check = inspect_path(folder.root, thorough=True)
    assert {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))} == before
    assert {found.state for found in check.findings} == {"whole"}
    names = {found.path.name for found in check.findings}
    shards = {path.name for path in folder.shards.iterdir()}
    assert names == {"plan.json", "frames", *RESULTS, *shards}
    assert check.document["whole"] is True
    assert check.document["findings"][0] == {"path": str(folder.plan), "state": "whole", "message": ""}
    assert check.summary == (
        f"{folder.root}: run folder, whole\n  whole: {len(names)} of {len(names)} files and folders"
    )


@pytest.mark.parametrize("thorough", [False, True])
def test_each_kind_is_recognised(folder: RunFolder, made_models: MadeModels, thorough: bool) -> None:
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
        found = inspect_path(path, thorough=thorough)
        assert (found.kind, found.is_complete, found.problems) == (kind, True, ())
        assert found.summary.startswith(f"{path}: {kind}, whole\n")
        if not thorough:
            assert found.document["facts"] == dict(found.facts) != {}


@pytest.mark.parametrize("name", ["plan.json", "frames/protein.bin", "shards/shard_00001.h5", *RESULTS])
def test_one_other_byte_is_found_where_it_is(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    content = bytearray(path.read_bytes())
    content[3 if path == folder.report else len(content) // 2] ^= 0x10
    path.write_bytes(content)
    blamed = path.parent if path.parent == folder.frames else path
    assert (blamed, "damaged") in states(folder.root)
    found = inspect_path(folder.root)
    assert not found.is_complete
    assert any(str(blamed) in problem for problem in found.problems)


def test_what_is_missing_is_named(folder: RunFolder) -> None:
    total = len(list(folder.shards.iterdir()))
    for index in (0, 1):
        folder.shard(index).unlink()
    [found] = bad(folder.root)
    assert (found.state, found.message.split(" shards")[0]) == ("missing", f"2 of {total}")
    quick = inspect_path(folder.root)
    assert ("shards", f"{total - 2} of {total} whole") in quick.facts
    assert f"  problem: 2 of {total} shards are still to be computed" in quick.summary
    missing = [folder.predictions, folder.contigs_parquet, folder.embeddings, folder.report]
    for path in missing:
        path.unlink()
    shutil.rmtree(folder.frames)
    assert {(path, "missing") for path in (*missing, folder.frames)} <= states(folder.root)


@pytest.mark.parametrize("name", ["dna", "protein", "scores"])
def test_swapped_rows_are_found_although_all_checksums_are_right(folder: RunFolder, name: str) -> None:
    def swap(values: np.ndarray) -> None:
        values[[3, 40]] = values[[40, 3]]

    change_dataset(folder.embeddings, name, swap)
    write_records(folder)
    found = bad(folder.root)
    assert {one.path for one in found} == {folder.embeddings}
    assert f"rows of {name!r} are not as in shard_00000.h5, the first is row 3 (contig" in found[0].message


@pytest.mark.parametrize("name", ["contigs.tsv", "regions.fa.gz", "contigs.parquet"])
def test_changed_tables_are_found_although_all_checksums_are_right(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    if path.suffix == ".gz":
        text = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(text[: text.rindex(b">")]))
    elif path.suffix == ".parquet":
        pq.write_table(pq.read_table(path).slice(1), path)
    else:
        header, *lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([header, *reversed(lines)]))
    write_records(folder)
    assert states(folder.root) == {(path, "damaged")}
    assert "is not what the shards give" in bad(folder.root)[0].message
    assert inspect_path(folder.root).is_complete


def test_other_compressors_another_threshold_and_leftovers_are_no_damage(
    folder: RunFolder, finished_run: MadeRun
) -> None:
    write_plan(folder.plan, replace(read_plan(folder.plan), threshold=0.503))
    assert folder.contigs in {one.path for one in bad(folder.root)}
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
    assert is_intact(folder.root)
    assert [(one.path, one.state) for one in bad(folder.root)] == [(path, "left over") for path in left]


def test_what_is_of_another_run_is_foreign(
    folder: RunFolder, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    other = plan_run(tmp_path / "other", contigs, made_models.config(repr_layer=2))
    other.compute()
    aggregate(other.folder, other.plan, other.store)
    foreign = [folder.shard(0), folder.shards / "shard_00077.h5", folder.embeddings]
    for source, path in zip(
        (other.folder.shard(0), other.folder.shard(1), other.folder.embeddings), foreign, strict=True
    ):
        assert is_intact(source)
        shutil.copy(source, path)
    write_records(folder)
    found = {one.path: one for one in bad(folder.root)}
    assert {found[path].state for path in foreign} == {"foreign"}
    assert "esm2.repr_layer is 2 in the file and 4 in the plan" in found[folder.shard(0)].message
    assert "protein_repr_layer is 2 in the file and 4 in the plan" in found[folder.embeddings].message
    for path in (folder.shard(0), folder.embeddings):
        assert states(path) == {(path, "foreign")}
    write_plan(folder.plan, replace(other.plan, input_digest="0" * 64))
    [difference] = bad(folder.embeddings)
    assert "plan_fingerprint is" in difference.message


def test_a_run_that_is_being_moved(
    finished_run: MadeRun, folder: RunFolder, made_models: MadeModels, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "other.safetensors", 2 * WIDTH, seed=7)
    copy = MadeRun(folder, finished_run.store, finished_run.plan)
    begin_move(copy, made_models.config(head=str(head))).compute([0])
    check = inspect_path(folder.root, thorough=True)
    assert check.is_complete
    assert "the beginning of a `virnuc reprocess`: 1 of" in check.summary
    folder.next.root.rename(folder.incoming.root)
    check = inspect_path(folder.root, thorough=True)
    assert not check.is_complete
    assert "is being put in the place of this one" in check.summary


def test_an_embed_run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run, out = (
        plan_run(tmp_path / "vectors.h5.run", contigs, config, kind="embed"),
        tmp_path / "vectors.h5",
    )
    run.compute()
    aggregate(run.folder, run.plan, run.store, out)
    run.folder.report.write_text(json.dumps({"files": records_of([out])}))
    assert is_intact(run.folder.root)
    assert is_intact(out)

    def change(values: np.ndarray) -> None:
        values[5] = 0

    change_dataset(out, "embeddings", change)
    assert not is_intact(run.folder.root)
    assert is_intact(out), "alone, it cannot be told"


@pytest.mark.parametrize("thorough", [False, True])
def test_other_and_damaged_files_are_called_by_their_name(
    folder: RunFolder, tmp_path: Path, thorough: bool
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
    kinds = {
        **dict.fromkeys([*contents, "arrays.npz"], "unknown file"),
        **dict.fromkeys(["cut.pt", "without_suffix", "folder"], "checkpoint"),
        "foreign.h5": "HDF5 file that virnuc did not write",
        "cut.h5": "damaged HDF5 file",
    }
    for name, kind in kinds.items():
        found = inspect_path(tmp_path / name, thorough=thorough)
        assert (found.kind, found.is_complete, len(found.problems)) == (kind, False, 1)
        if kind == "unknown file":
            assert "is no shard, embeddings file, model checkpoint or classifier head" in found.problems[0]
    with pytest.raises(InputError, match="nothing at"):
        inspect_path(tmp_path / "nowhere", thorough=thorough)


@pytest.mark.parametrize("content", ["", "{}", "[]", "not JSON", '{"files": [{"name": "contigs.tsv"}]}'])
def test_a_report_without_records(folder: RunFolder, content: str) -> None:
    folder.report.write_text(content)
    [problem] = inspect_path(folder.root).problems
    assert "does not say what the result files of the run are" in problem
