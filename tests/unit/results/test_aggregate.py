"""All shards in one file, in input order."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
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
from virnuc_core.run_folder import RunFolder


def test_rows_are_those_of_the_shards_with_their_ids(finished_run: MadeRun, tmp_path: Path) -> None:
    folder, plan, store = finished_run.folder, finished_run.plan, finished_run.store
    with h5py.File(folder.embeddings) as file:
        assert list(file) == ["dna", "frame_ids", "protein", "scores"]
        assert file["frame_ids"].asstr()[:].tolist() == store.frame_ids(0, store.num_frames)
        assert file["dna"].dtype == np.float32
        for shard, result in iter_shard_results(folder, plan):
            for name in ("dna", "protein", "scores"):
                np.testing.assert_array_equal(file[name][shard.begin : shard.end], getattr(result, name))
    expected = {
        "schema_version": 3,
        "plan_fingerprint": plan.fingerprint,
        "dna_model_name": "dnabert",
        "dna_embedding_dim": WIDTH,
        "dna_pooling": "mean over all tokens, [CLS] and [SEP] included",
        "protein_weights_fingerprint": plan.models[1].weights_fingerprint,
        "protein_repr_layer": 4,
        "dtype": "float32",
        "virnuc_version": plan.virnuc_version,
    }
    with Embeddings(folder.embeddings, own=True) as embeddings:
        assert expected.items() <= embeddings.attrs.items()
        embeddings.verify()
    assert aggregate(folder, plan, store, tmp_path / "again.h5").frames == store.num_frames
    assert (tmp_path / "again.h5").read_bytes() == folder.embeddings.read_bytes()


def test_shards_are_merged_as_they_are_committed(finished_run: MadeRun, tmp_path: Path) -> None:
    plan, out, folder = finished_run.plan, tmp_path / "out.h5", RunFolder(tmp_path / "run")
    folder.shards.mkdir(parents=True)
    all_committed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        merging = pool.submit(aggregate, folder, plan, finished_run.store, out, all_committed)
        for shard in reversed(plan.shards):
            assert not merging.done()
            name = finished_run.folder.shard(shard.index).name
            shutil.copy(finished_run.folder.shards / name, tmp_path / name)
            (tmp_path / name).rename(folder.shard(shard.index))
        assert merging.result(timeout=60).frames == plan.num_rows
    assert out.read_bytes() == finished_run.folder.embeddings.read_bytes()


def test_merging_ends_with_the_lanes(finished_run: MadeRun, tmp_path: Path) -> None:
    plan, folder = finished_run.plan, RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.shards, folder.shards)
    folder.shard(plan.shards[-1].index).unlink()
    all_committed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        merging = pool.submit(aggregate, folder, plan, finished_run.store, None, all_committed)
        all_committed.set()
        with pytest.raises(DamagedFileError, match="is corrupt"):
            merging.result(timeout=60)
    assert [path.name for path in folder.root.iterdir()] == ["shards"]


def test_an_embed_run_of_complete_sequences_with_any_ids(tmp_path: Path, made_models: MadeModels) -> None:
    long = "x" * 500
    fasta = tmp_path / "proteins.faa"
    fasta.write_text(f">first\nMKVLAT\n>Straße|ä words\nMK\n>first\nMKVLATWWWW\n>{long}\nMK\n")
    config = made_models.config(dnabert_model=None, head=None, chunk_length=None, embeddings="float16")
    run = plan_run(tmp_path / "run", fasta, config, kind="embed")
    run.compute()
    aggregate(run.folder, run.plan, run.store, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file) == ["embeddings", "ids", "lengths"]
        assert file["ids"].asstr()[:].tolist() == ["first", "Straße|ä", "first_dup2", long]
        assert file["lengths"][:].tolist() == [6, 2, 10, 2]
        assert file["embeddings"].dtype == np.float16
        assert file.attrs["model_family"] == "esm2"


def test_shards_that_are_missing_damaged_or_of_another_run_leave_no_file(
    finished_run: MadeRun, tmp_path: Path, made_models: MadeModels
) -> None:
    plan, store = finished_run.plan, finished_run.store
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished_run.folder.shards, folder.shards)
    shard = folder.shard(1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is corrupt"):
        aggregate(folder, plan, store)
    shard.unlink()
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is corrupt"):
        aggregate(folder, plan, store)
    other = plan_run(tmp_path / "other", write_contigs(tmp_path / "in.fa", seed=9), made_models.config())
    for wrong in ((plan, other.store), (replace(plan, shards=plan.shards[:-1]), store)):
        with pytest.raises(MismatchError, match="does not belong"):
            aggregate(folder, *wrong)
    assert [path.name for path in folder.root.iterdir()] == ["shards"]
