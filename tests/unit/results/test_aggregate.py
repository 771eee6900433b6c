"""All shards in one file, in input order."""

import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.made_models import WIDTH, MadeModels, MadeRun, plan_run, write_contigs
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings


def test_rows_are_those_of_the_shards_with_their_ids(finished_run: MadeRun, tmp_path: Path) -> None:
    store = finished_run.store
    with h5py.File(finished_run.folder.embeddings) as file:
        assert list(file) == ["dna", "frame_ids", "protein", "scores"]
        assert file["frame_ids"].asstr()[:].tolist() == store.frame_ids(0, store.num_frames)
        assert file["dna"].dtype == np.float32
        for shard, result in iter_shard_results(finished_run.folder, finished_run.plan):
            rows = slice(shard.begin, shard.end)
            np.testing.assert_array_equal(file["dna"][rows], result.dna)
            np.testing.assert_array_equal(file["protein"][rows], result.protein)
            np.testing.assert_array_equal(file["scores"][rows], result.scores)
    total = aggregate(finished_run.folder, finished_run.plan, store, tmp_path / "again.h5")
    assert total.frames == store.num_frames
    assert (tmp_path / "again.h5").read_bytes() == finished_run.folder.embeddings.read_bytes()


def test_it_says_how_it_was_made(finished_run: MadeRun) -> None:
    plan = finished_run.plan
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        found = file.attrs
    expected = {
        "schema_version": 2,
        "plan_fingerprint": plan.fingerprint,
        "dna_model_name": "dnabert",
        "dna_embedding_dim": WIDTH,
        "dna_pooling": "mean over all tokens, [CLS] and [SEP] included",
        "protein_weights_fingerprint": plan.models[1].weights_fingerprint,
        "protein_num_layers": 4,
        "protein_repr_layer": 4,
        "dtype": "float32",
        "virnuc_version": plan.virnuc_version,
    }
    assert expected.items() <= found.items()


def test_complete_sequences(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "proteins.faa"
    fasta.write_text(">first\nMKVLAT\n>second\nMK\n>first\nMKVLATWWWW\n")
    config = made_models.config(dnabert_model=None, head=None, chunk_length=None, embeddings="float16")
    run = plan_run(tmp_path / "run", fasta, config, kind="embed")
    run.compute()
    aggregate(run.folder, run.plan, run.store, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file) == ["embeddings", "ids", "lengths"]
        assert file["ids"].asstr()[:].tolist() == ["first", "second", "first_dup2"]
        assert file["lengths"][:].tolist() == [6, 2, 10]
        assert file["embeddings"].dtype == np.float16
        assert file["embeddings"].shape == (3, WIDTH)
        assert file.attrs["model_family"] == "esm2"


def test_no_stop_free_frame_at_all_is_an_empty_file(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\n" + "TTAATTAACTAGCTAG" * 4 + "\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    assert run.plan.shards == ()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings, own=True) as file:
        assert (len(file), file.ids) == (0, [])
        assert file.rows("dna", 0, 0).shape == (0, WIDTH)


def test_long_and_foreign_ids(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    names = ["x" * 500, "Straße|ä", "a"]
    fasta.write_text("".join(f">{name} words\nATGAAAGTTCTG\n" for name in names))
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings, own=True) as file:
        assert file.ids == run.store.frame_ids(0, run.store.num_frames)
        assert file.ids[0].startswith("x" * 500 + "_chunk_1F")


def test_shards_that_are_missing_or_damaged_leave_no_file(finished_run: MadeRun, tmp_path: Path) -> None:
    run = replace(finished_run, folder=type(finished_run.folder)(tmp_path / "run"))
    shutil.copytree(finished_run.folder.shards, run.folder.shards)
    shard = run.folder.shard(1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is not whole"):
        aggregate(run.folder, run.plan, run.store)
    shard.unlink()
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is missing"):
        aggregate(run.folder, run.plan, run.store)
    assert [path.name for path in run.folder.root.iterdir()] == ["shards"]


def test_another_store_or_plan_is_refused(
    finished_run: MadeRun, tmp_path: Path, made_models: MadeModels
) -> None:
    other = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", seed=9), made_models.config())
    half = replace(finished_run.plan, shards=finished_run.plan.shards[:-1])
    for plan, store in ((finished_run.plan, other.store), (half, finished_run.store)):
        with pytest.raises(MismatchError, match="not the one"):
            aggregate(finished_run.folder, plan, store, tmp_path / "out.h5")


def test_no_flipped_byte_changes_a_value(finished_run: MadeRun, tmp_path: Path) -> None:
    content = finished_run.folder.embeddings.read_bytes()
    path = tmp_path / "flipped.h5"
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        expected = {name: file.rows(name, 0, len(file)) for name in file.names}
        attributes = file.attrs
    for position in np.random.default_rng(2).choice(len(content), 200, replace=False).tolist():
        flipped = bytearray(content)
        flipped[position] ^= 0x12
        path.write_bytes(flipped)
        try:
            with Embeddings(path, own=True) as file:
                found = {name: file.rows(name, 0, len(file)) for name in file.names}
                assert file.attrs == attributes
        except DamagedFileError:
            continue
        assert list(found) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_each_dataset_has_a_checksum_over_all_its_values(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    shutil.copy(finished_run.folder.embeddings, path)
    with Embeddings(path, own=True) as embeddings:
        embeddings.verify()
        assert all(f"{name}_sha256" in embeddings.attrs for name in embeddings.names)
    with h5py.File(path, "r+") as file:  # with valid chunk checksums
        file["dna"][7] = file["dna"][8]
    with (
        Embeddings(path, own=True) as embeddings,
        pytest.raises(DamagedFileError, match="the checksum of 'dna' is wrong"),
    ):
        embeddings.verify()
