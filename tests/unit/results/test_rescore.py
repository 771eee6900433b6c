"""Stored vectors scored again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_models import MadeModels, MadeRun, make_head
from virnuc_core.errors import CheckpointError, DamagedFileError, MismatchError, UsageError
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.results.embeddings import export_embeddings
from virnuc_core.results.rescore import score_embeddings


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scores.tsv"


def test_the_same_head_gives_the_same_table(
    finished_run: MadeRun, made_models: MadeModels, out: Path, tmp_path: Path
) -> None:
    embeddings, head = finished_run.folder.embeddings, str(made_models.head)
    assert score_embeddings(embeddings, head, out) == finished_run.store.num_frames
    old, new = (path.read_text().splitlines() for path in (finished_run.folder.prediction_results, out))
    assert [line.split("\t")[0] for line in new] == [line.split("\t")[0] for line in old]
    for left, right in zip(old[1:], new[1:], strict=True):
        values = [[float(text) for text in line.split("\t")[2:]] for line in (left, right)]
        assert values[0] == pytest.approx(values[1], abs=1e-6)
    export_embeddings(embeddings, tmp_path / "exported.npz")
    score_embeddings(tmp_path / "exported.npz", head, tmp_path / "again.tsv")
    assert (tmp_path / "again.tsv").read_bytes() == out.read_bytes()
    score_embeddings(embeddings, str(make_head(tmp_path / "other.safetensors", 192, seed=3)), out)
    assert out.read_text().splitlines() != new


def test_heads_that_do_not_fit(finished_run: MadeRun, out: Path, tmp_path: Path) -> None:
    wide = make_head(tmp_path / "wide.safetensors", 100)
    save_classifier(MLPClassifier(192), tmp_path / "head.safetensors", {"chunk_length": 300})
    for head, error, message in (
        (wide, MismatchError, "100"),
        ("nowhere", CheckpointError, "nowhere"),
        (tmp_path / "head.safetensors", MismatchError, "for chunks of 300 bp, and these have 60 bp"),
    ):
        with pytest.raises(error, match=message):
            score_embeddings(finished_run.folder.embeddings, str(head), out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"dna": np.zeros((1, 96), np.float32)}, UsageError, "no protein vectors"),
        ({"embeddings": np.zeros((1, 96), np.float32)}, UsageError, "no dna and no protein vectors"),
        ({"vectors": np.full((1, 192), np.nan)}, DamagedFileError, r"row 0 .*not finite"),
        ({"vectors": np.zeros((1, 192), np.float32)}, UsageError, "--dna-head"),
    ],
)
def test_vectors_that_cannot_be_scored(
    arrays: dict[str, Any],
    error: type[Exception],
    message: str,
    made_models: MadeModels,
    out: Path,
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "x.npz", ids=["a"], **arrays)
    dna_head = str(made_models.dna_head) if message == "--dna-head" else None
    with pytest.raises(error, match=message):
        score_embeddings(tmp_path / "x.npz", str(made_models.head), out, dna_head)
    assert not out.exists()
