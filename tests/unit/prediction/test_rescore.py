"""Stored vectors scored again."""

from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, make_head, plan_run
from virnuc_core.errors import CheckpointError, MismatchError, UsageError
from virnuc_core.prediction.aggregate import aggregate
from virnuc_core.prediction.rescore import score_embeddings


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


def test_a_file_without_vectors(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(embeddings="none"))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with pytest.raises(UsageError, match="no dna and no protein vectors"):
        score_embeddings(run.folder.embeddings, str(made_models.head), tmp_path / "scores.tsv")
