"""All shards in one file, in input order."""

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


def test_rows_are_those_of_the_shards_with_their_ids(finished_run: MadeRun) -> None:
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


def test_it_says_how_it_was_made(finished_run: MadeRun) -> None:
    plan = finished_run.plan
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        found = file.attrs
    assert found["schema_version"] == 2
    assert found["plan_fingerprint"] == plan.fingerprint
    assert found["dna_model_name"] == "dnabert"
    assert found["protein_weights_fingerprint"] == plan.models[1].weights_fingerprint
    assert (found["protein_num_layers"], found["protein_repr_layer"]) == (4, 4)
    assert found["dna_embedding_dim"] == WIDTH
    assert found["dtype"] == "float32"
    assert "[CLS]" in found["dna_pooling"]
    assert found["virnuc_version"] == plan.virnuc_version


def test_the_work_of_all_shards_is_added_up(finished_run: MadeRun, tmp_path: Path) -> None:
    total = aggregate(finished_run.folder, finished_run.plan, finished_run.store, tmp_path / "again.h5")
    assert total.frames == finished_run.store.num_frames
    assert (tmp_path / "again.h5").read_bytes() == finished_run.folder.embeddings.read_bytes()


def test_whole_sequences(tmp_path: Path, made_models: MadeModels) -> None:
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


def test_scores_alone(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(embeddings="none"))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings, own=True) as file:
        assert file.names == ("frame_ids", "scores")


def test_no_open_frame_at_all_is_an_empty_file(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\n" + "TTAATTAACTAGCTAG" * 4 + "\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    assert run.plan.shards == ()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings, own=True) as file:
        assert len(file) == 0
        assert file.read_ids(0, 10) == []
        assert file.rows("dna", 0, 0).shape == (0, WIDTH)


def test_a_missing_shard_leaves_no_file(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    run = plan_run(tmp_path, contigs, made_models.config())
    run.compute([0])
    with pytest.raises(DamagedFileError, match="shard_00001"):
        aggregate(run.folder, run.plan, run.store)
    assert not run.folder.embeddings.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_another_store_is_refused(finished_run: MadeRun, tmp_path: Path, made_models: MadeModels) -> None:
    other = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", seed=9), made_models.config())
    with pytest.raises(MismatchError, match="not the one"):
        aggregate(finished_run.folder, finished_run.plan, other.store, tmp_path / "out.h5")


def test_long_and_foreign_ids(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    names = ["x" * 500, "Straße|ä", "a"]
    fasta.write_text("".join(f">{name} words\nATGAAAGTTCTG\n" for name in names))
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings, own=True) as file:
        found = file.read_ids(0, len(file))
    assert found == run.store.frame_ids(0, run.store.num_frames)
    assert found[0].startswith("x" * 500 + "_chunk_1F")


def test_no_flipped_byte_changes_a_value(finished_run: MadeRun, tmp_path: Path) -> None:
    content = finished_run.folder.embeddings.read_bytes()
    path = tmp_path / "flipped.h5"
    with Embeddings(finished_run.folder.embeddings, own=True) as whole:
        expected = {name: whole.rows(name, 0, len(whole)) for name in whole.names}
        attributes = whole.attrs
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


def test_half_a_plan_is_not_merged(finished_run: MadeRun, tmp_path: Path) -> None:
    plan = replace(finished_run.plan, shards=finished_run.plan.shards[:-1])
    with pytest.raises(MismatchError):
        aggregate(finished_run.folder, plan, finished_run.store, tmp_path / "out.h5")


def test_each_dataset_has_a_checksum_over_all_its_values(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    path.write_bytes(finished_run.folder.embeddings.read_bytes())
    with Embeddings(path, own=True) as embeddings:
        embeddings.verify()
        assert all(f"{name}_sha256" in embeddings.attrs for name in embeddings.names)
    with h5py.File(path, "r+") as file:  # with checksums of its pieces that are right
        file["dna"][7] = file["dna"][8]
    with (
        Embeddings(path, own=True) as embeddings,
        pytest.raises(DamagedFileError, match="the checksum of 'dna' is wrong"),
    ):
        embeddings.verify()
