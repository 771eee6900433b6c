"""Re-scoring stored vectors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.made_models import GOLDEN, MadeModels, MadeRun, make_head
from virnuc_core.errors import CheckpointError, DamagedFileError, MismatchError, UsageError
from virnuc_core.models.classifier import MLPClassifier, save_classifier
from virnuc_core.results.embeddings import export_embeddings
from virnuc_core.results.rescore import score_embeddings

CLASSIFIER = GOLDEN / "classifier"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scores.tsv"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """The golden features in VirNucPro's format."""
    with np.load(CLASSIFIER / "golden.npz") as golden:
        data = torch.from_numpy(golden["features"])
    path = tmp_path / "output_1_merged.pt"
    torch.save({"ids": [f"k141_{i}_chunk_1F1" for i in range(len(data))], "data": data}, path)
    return path


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


def test_features_of_virnucpro_get_its_scores(merged: Path, out: Path) -> None:
    score_embeddings(merged, str(CLASSIFIER / "pickled_module.pth"), out)
    lines = out.read_text().splitlines()[1:]
    with np.load(CLASSIFIER / "golden.npz") as golden:
        probabilities = golden["probabilities"]
    assert [line.split("\t")[0] for line in lines] == [f"k141_{i}_chunk_1F1" for i in range(len(lines))]
    found = np.array([[float(text) for text in line.split("\t")[2:]] for line in lines])
    np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-6)


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
    ],
)
def test_vectors_that_cannot_be_scored(
    arrays: dict[str, np.ndarray],
    error: type[Exception],
    message: str,
    made_models: MadeModels,
    out: Path,
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "x.npz", ids=["a"], **arrays)
    with pytest.raises(error, match=message):
        score_embeddings(tmp_path / "x.npz", str(made_models.head), out)
    assert not out.exists()


def test_a_dna_head_needs_the_dna_vectors_apart(merged: Path, out: Path) -> None:
    head = str(CLASSIFIER / "pickled_module.pth")
    with pytest.raises(UsageError, match="--dna-head"):
        score_embeddings(merged, head, out, head)
