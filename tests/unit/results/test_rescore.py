"""Stored vectors scored again."""

from pathlib import Path

import h5py
import pytest

from tests.made_models import MadeModels, MadeRun, make_head, plan_run
from virnuc_core.errors import CheckpointError, DamagedFileError, InputError, MismatchError, UsageError
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.rescore import score_embeddings


def test_the_same_head_gives_the_same_table(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out = tmp_path / "scores.tsv"
    rows = score_embeddings(finished_run.folder.embeddings, str(made_models.head), out)
    assert rows == finished_run.store.num_frames
    old, new = (path.read_text().splitlines() for path in (finished_run.folder.prediction_results, out))
    assert [line.split("\t")[0] for line in new] == [line.split("\t")[0] for line in old]
    for left, right in zip(old[1:], new[1:], strict=True):
        values = [[float(text) for text in line.split("\t")[2:]] for line in (left, right)]
        assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_another_head_gives_other_scores(finished_run: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "scores.tsv"
    head = make_head(tmp_path / "other.safetensors", 192, seed=3)
    score_embeddings(finished_run.folder.embeddings, str(head), out)
    assert out.read_text() != finished_run.folder.prediction_results.read_text()


def test_a_head_that_does_not_fit(finished_run: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "scores.tsv"
    head = make_head(tmp_path / "wide.safetensors", 100)
    with pytest.raises(MismatchError, match="100"):
        score_embeddings(finished_run.folder.embeddings, str(head), out)
    with pytest.raises(CheckpointError, match="nowhere"):
        score_embeddings(finished_run.folder.embeddings, "nowhere", out)
    assert not out.exists()


def test_a_head_for_chunks_of_another_length(finished_run: MadeRun, tmp_path: Path) -> None:
    head, out = tmp_path / "head.safetensors", tmp_path / "scores.tsv"
    save_classifier(MLPClassifier(192), head, {"chunk_length": 300})
    with pytest.raises(MismatchError, match="for chunks of 300 bp, and these have 60 bp"):
        score_embeddings(finished_run.folder.embeddings, str(head), out)
    assert not out.exists()


def test_a_file_without_vectors(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(embeddings="none"))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with pytest.raises(UsageError, match="no dna and no protein vectors"):
        score_embeddings(run.folder.embeddings, str(made_models.head), tmp_path / "scores.tsv")


def test_files_of_other_kinds_are_called_by_their_name(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out, head = tmp_path / "scores.tsv", str(made_models.head)
    with pytest.raises(InputError, match=r"none\.h5 does not exist: give the embeddings\.h5"):
        score_embeddings(tmp_path / "none.h5", head, out)
    with pytest.raises(InputError, match="is a folder"):
        score_embeddings(tmp_path, head, out)
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["dna"] = [1.0]
    (tmp_path / "text.h5").write_text("text")
    (tmp_path / "cut.h5").write_bytes(finished_run.folder.embeddings.read_bytes()[:-1])
    kinds = {
        finished_run.folder.shard(0): "shard",
        tmp_path / "foreign.h5": "HDF5 file that virnuc did not write",
        tmp_path / "text.h5": "file of another format than HDF5, .npz and torch",
        tmp_path / "cut.h5": "damaged HDF5 file",
    }
    for path, kind in kinds.items():
        with pytest.raises(DamagedFileError) as caught:
            score_embeddings(path, head, out)
        assert str(caught.value) == (
            f"{path} is a {kind}, not a whole embeddings file: give the embeddings.h5 of a predict run, the file of an "
            "embed run, an .npz with ids and vectors, or the *_merged.pt of VirNucPro."
        )
    assert not out.exists()
