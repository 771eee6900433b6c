"""Every byte of a run is looked at, and what is found is said by name."""

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

from tests.made_models import WIDTH, MadeModels, MadeRun, make_head, plan_run
from tests.made_moves import begin_move
from virnuc_core.checked_hdf5 import write_attributes
from virnuc_core.errors import InputError
from virnuc_core.inference.plan import read_plan, write_plan
from virnuc_core.results import writers
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.integrity import Finding, inspect_path
from virnuc_core.results.run_json import records_of
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder


@pytest.fixture
def folder(finished_run: MadeRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, report included."""
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.root, copy.root)
    write_records(copy)
    return copy


def write_records(folder: RunFolder) -> None:
    folder.page.write_text("<!DOCTYPE html>")
    results = [path for path in folder.results if path != folder.report]
    folder.report.write_text(json.dumps({"files": records_of(results)}))


def bad(path: Path) -> list[Finding]:
    return [found for found in inspect_path(path, thorough=True).findings if found.state != "whole"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def replace_rows(path: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes values as somebody would who knows how to make all checksums right again."""
    with h5py.File(path, "r+") as file:
        values = file[name][()]
        change(values)
        file[name][...] = values
        attributes = {n: v if isinstance(v, str) else v.item() for n, v in file.attrs.items()}
        del attributes["attributes_sha256"]
        from virnuc_core.checked_hdf5 import array_sha256

        attributes[f"{name}_sha256"] = array_sha256(values)
        write_attributes(file, attributes)


def test_a_whole_run(folder: RunFolder) -> None:
    check = inspect_path(folder.root, thorough=True)
    assert check.is_complete
    assert {found.state for found in check.findings} == {"whole"}
    names = {found.path.name for found in check.findings}
    assert {path.name for path in (folder.plan, folder.frames, *folder.results)} < names
    assert len(names) == len(read_plan(folder.plan).shards) + 18
    assert check.document["whole"] is True
    assert check.summary == (
        f"{folder.root}: run folder, whole\n  whole: {len(names)} of {len(names)} files and folders"
    )


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("plan.json", "damaged"),
        ("frames/protein.bin", "damaged"),
        ("shards/shard_00001.h5", "damaged"),
        ("embeddings.h5", "damaged"),
        ("predictions.tsv", "damaged"),
        ("contigs.tsv", "damaged"),
        ("prediction_results.txt", "damaged"),
        ("prediction_results_highestscore.csv", "damaged"),
        ("regions.tsv", "damaged"),
        ("regions.bed", "damaged"),
        ("regions.gff3", "damaged"),
        ("regions.parquet", "damaged"),
        ("regions.fa.gz", "damaged"),
        ("viral_contigs.fa.gz", "damaged"),
        ("predictions.parquet", "damaged"),
        ("contigs.parquet", "damaged"),
        ("rejected.tsv", "damaged"),
        ("report.html", "damaged"),
        ("run.json", "damaged"),
    ],
)
def test_one_other_byte_is_found_where_it_is(folder: RunFolder, name: str, state: str) -> None:
    path = folder.root / name
    flip(path, 3 if path == folder.report else path.stat().st_size // 2)
    found = bad(folder.root)
    blamed = path.parent if path.parent == folder.frames else path
    assert (blamed, state) in {(one.path, one.state) for one in found}
    assert all(str(blamed) in one.message for one in found if one.path == blamed)


@pytest.mark.parametrize(
    "name", ["predictions.tsv", "regions.tsv", "contigs.parquet", "embeddings.h5", "run.json", "frames"]
)
def test_what_is_missing_is_named(folder: RunFolder, name: str) -> None:
    path = folder.root / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (path, "missing") in {(one.path, one.state) for one in bad(folder.root)}


def test_missing_shards_are_counted(folder: RunFolder) -> None:
    for index in (0, 1):
        folder.shard(index).unlink()
    [found] = bad(folder.root)
    assert found.state == "missing"
    assert found.message.startswith("2 of ")


@pytest.mark.parametrize("name", ["dna", "protein", "scores"])
def test_swapped_rows_are_found_although_all_checksums_are_right(folder: RunFolder, name: str) -> None:
    def swap(values: np.ndarray) -> None:
        values[[3, 40]] = values[[40, 3]]

    replace_rows(folder.embeddings, name, swap)
    write_records(folder)
    found = bad(folder.root)
    assert {one.path for one in found} == {folder.embeddings}
    assert f"rows of {name!r} are not as in shard_00000.h5, the first is row 3 (contig" in found[0].message


def test_tables_are_compared_with_what_the_shards_give(folder: RunFolder) -> None:
    lines = folder.contigs.read_text().splitlines(keepends=True)
    folder.contigs.write_text("".join([lines[0], *reversed(lines[1:])]))
    write_records(folder)
    [found] = bad(folder.root)
    assert (found.path, found.state) == (folder.contigs, "damaged")
    assert "is not what the shards give" in found.message


def test_nothing_is_written(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_SORTED_IN_MEMORY", 5)
    monkeypatch.setattr(tempfile, "tempdir", str(folder.root / "absent"))
    before = {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))}
    assert inspect_path(folder.root, thorough=True).is_complete
    assert {path: path.stat().st_mtime_ns for path in (folder.root, *folder.root.rglob("*"))} == before


@pytest.mark.parametrize("change", ["swapped", "doubled", "shortened", "other", "headless"])
def test_the_sorted_table_is_compared_line_by_line(folder: RunFolder, change: str) -> None:
    header, *lines = folder.highest_score.read_text().splitlines(keepends=True)
    changed = {
        "swapped": [header, lines[1], lines[0], *lines[2:]],
        "doubled": [header, lines[0], *lines],
        "shortened": [header, *lines[:-1]],
        "other": [header, lines[0].replace("True", "Truer").replace("False", "Falser"), *lines[1:]],
        "headless": lines,
    }
    folder.highest_score.write_text("".join(changed[change]))
    write_records(folder)
    assert [(one.path, one.state) for one in bad(folder.root)] == [(folder.highest_score, "damaged")]


def test_tables_are_those_of_the_threshold_of_the_run(folder: RunFolder, finished_run: MadeRun) -> None:
    write_plan(folder.plan, replace(read_plan(folder.plan), threshold=0.503))
    write_records(folder)
    assert folder.contigs in {one.path for one in bad(folder.root)}
    write_tables(folder, finished_run.store, 0.503)
    write_records(folder)
    assert inspect_path(folder.root, thorough=True).is_complete


@pytest.mark.parametrize(
    "name", ["regions", "regions_bed", "viral_contigs", "contigs_parquet", "regions_parquet", "regions_fasta"]
)
def test_changed_results_are_found_although_all_checksums_are_right(folder: RunFolder, name: str) -> None:
    path = getattr(folder, name)
    if name in ("viral_contigs", "regions_fasta"):
        text = gzip.decompress(path.read_bytes())
        assert text.count(b">") > 1
        path.write_bytes(gzip.compress(text[: text.rindex(b">")]))
    elif name.endswith("parquet"):
        pq.write_table(pq.read_table(path).slice(1), path)
    else:
        path.write_text(path.read_text().replace("contig1", "contig2", 1))
    write_records(folder)
    assert [(one.path, one.state) for one in bad(folder.root)] == [(path, "damaged")]


def test_other_versions_of_the_compressors_are_no_damage(folder: RunFolder) -> None:
    text = gzip.decompress(folder.viral_contigs.read_bytes())
    folder.viral_contigs.write_bytes(gzip.compress(text, 1))
    table = pq.read_table(folder.contigs_parquet)
    pq.write_table(table, folder.contigs_parquet, compression="snappy")
    write_records(folder)
    assert inspect_path(folder.root, thorough=True).is_complete


def test_what_is_of_another_run_is_foreign(
    folder: RunFolder, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    other = plan_run(tmp_path / "other", contigs, made_models.config(repr_layer=2))
    other.compute()
    aggregate(other.folder, other.plan, other.store)
    shutil.copy(other.folder.shard(0), folder.shard(0))
    shutil.copy(other.folder.shard(1), folder.shards / "shard_00077.h5")
    shutil.copy(other.folder.embeddings, folder.embeddings)
    write_records(folder)
    states = {one.path: one for one in bad(folder.root)}
    for path in (folder.shard(0), folder.shards / "shard_00077.h5", folder.embeddings):
        assert states[path].state == "foreign"
    assert "esm2.repr_layer is 2 in the file and 4 in the plan" in states[folder.shard(0)].message
    assert "protein_repr_layer is 2 in the file and 4 in the plan" in states[folder.embeddings].message
    for path in (folder.shard(0), folder.embeddings):
        assert [one.state for one in inspect_path(path, thorough=True).findings] == ["foreign"]
        assert inspect_path(other.folder.root / path.relative_to(folder.root), thorough=True).is_complete


def test_what_is_left_over_does_no_harm(folder: RunFolder, made_models: MadeModels) -> None:
    left = [
        folder.root / ".embeddings.h5.tmp",
        folder.shards / ".shard_00000.h5.0123456789abcdef.tmp",
        folder.shards / "shard_00000.h5.damaged-1",
    ]
    for path in left:
        path.touch()
    check = inspect_path(folder.root, thorough=True)
    assert check.is_complete
    assert [one.path for one in check.findings if one.state == "left over"] == left


def test_a_run_that_is_being_moved(
    finished_run: MadeRun, folder: RunFolder, made_models: MadeModels, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "other.safetensors", 2 * WIDTH, seed=7)
    copy = MadeRun(folder, finished_run.store, finished_run.plan)
    moved = begin_move(copy, made_models.config(head=str(head)))
    moved.compute([0])
    check = inspect_path(folder.root, thorough=True)
    assert check.is_complete
    assert "the beginning of a `virnuc reprocess`: 1 of" in check.summary
    folder.next.root.rename(folder.incoming.root)
    check = inspect_path(folder.root, thorough=True)
    assert not check.is_complete
    assert "is being put in the place of this one" in check.summary


def test_one_file(folder: RunFolder, made_models: MadeModels) -> None:
    for path in (folder.embeddings, folder.shard(0), made_models.head, folder.frames):
        assert inspect_path(path, thorough=True).is_complete
    flip(folder.shard(0), folder.shard(0).stat().st_size // 2)
    assert not inspect_path(folder.shard(0), thorough=True).is_complete
    with pytest.raises(InputError):
        inspect_path(folder.root / "absent", thorough=True)


def test_an_embed_run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run = plan_run(tmp_path / "vectors.h5.run", contigs, config, kind="embed")
    run.compute()
    aggregate(run.folder, run.plan, run.store, tmp_path / "vectors.h5")
    run.folder.report.write_text(json.dumps({"files": records_of([tmp_path / "vectors.h5"])}))
    assert inspect_path(run.folder.root, thorough=True).is_complete
    assert inspect_path(tmp_path / "vectors.h5", thorough=True).is_complete

    def change(values: np.ndarray) -> None:
        values[5] = 0

    replace_rows(tmp_path / "vectors.h5", "embeddings", change)
    assert not inspect_path(run.folder.root, thorough=True).is_complete
    assert inspect_path(tmp_path / "vectors.h5", thorough=True).is_complete, "alone, it cannot be told"


def test_each_difference_from_the_plan_is_named(folder: RunFolder) -> None:
    plan = read_plan(folder.plan)
    models = (plan.models[0], replace(plan.models[1], precision="fp16", token_budget=7))
    for other, message in (
        (
            replace(plan, models=models),
            "protein_precision is fp32 in the file and fp16 in the plan; protein_token",
        ),
        (replace(plan, input_digest="0" * 64), "plan_fingerprint is"),
    ):
        write_plan(folder.plan, other)
        [found] = inspect_path(folder.embeddings, thorough=True).findings
        assert (found.state, message in found.message) == ("foreign", True)
