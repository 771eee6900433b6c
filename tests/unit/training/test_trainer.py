"""Training and calibration of a head."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_core.models.classifier import MLPClassifier, load_classifier, save_classifier
from virnuc_core.training.metrics import calibration_error
from virnuc_core.training.trainer import (
    LabelledVectors,
    TrainerSettings,
    apply_temperature,
    fit_temperature,
    margins_of,
    train_head,
)

SETTINGS = TrainerSettings(epochs=8, patience=3, members=1)


def made_vectors(count: int, seed: int, gap: float = 8.0) -> LabelledVectors:
    """Vectors whose third feature separates the classes."""
    rng = np.random.default_rng(seed)
    is_viral = rng.random(count) < 0.5
    features = rng.normal(3, 5, (count, 8)).astype(np.float32)
    features[:, 2] += np.where(is_viral, gap, -gap)
    return LabelledVectors(features=features, is_viral=is_viral, weights=np.full(count, 1 / count))


def test_a_head_separates_what_can_be_separated(tmp_path: Path) -> None:
    trained = train_head(made_vectors(2000, 0), made_vectors(400, 1), SETTINGS)
    save_classifier(trained.classifier, tmp_path / "head.safetensors")
    others = made_vectors(1000, 2)
    p = load_classifier(tmp_path / "head.safetensors").virus_probabilities(torch.from_numpy(others.features))
    assert ((p[:, 1].numpy() >= 0.5) == others.is_viral).mean() > 0.9
    losses = [epoch.validation_loss for epoch in trained.history if epoch.validation_loss is not None]
    assert min(losses) == losses[trained.best_epochs[0] - 1]


def test_early_stopping() -> None:
    rng = np.random.default_rng(3)
    noise = [
        replace(made_vectors(count, seed, gap=0.0), is_viral=rng.random(count) < 0.5)
        for count, seed in ((500, 4), (300, 5))
    ]
    trained = train_head(*noise, TrainerSettings(epochs=50, patience=2, members=1))
    assert len(trained.history) == trained.best_epochs[0] + 2 < 50


def test_without_validation_all_epochs_are_run() -> None:
    trained = train_head(made_vectors(500, 9), None, TrainerSettings(epochs=4, patience=1, members=2))
    assert trained.best_epochs == (4, 4)
    assert trained.temperature == 1.0
    assert [epoch.validation_loss for epoch in trained.history] == [None] * 8


def test_frames_are_sampled_by_their_weights() -> None:
    # Identical vectors in both classes, but viral ones are sampled 9 times as often.
    features = np.random.default_rng(6).normal(size=(2000, 4)).astype(np.float32)
    is_viral = np.arange(2000) % 2 == 0
    weights = np.where(is_viral, 0.9, 0.1) / 1000
    vectors = LabelledVectors(features=features, is_viral=is_viral, weights=weights)
    trained = train_head(vectors, vectors, SETTINGS)
    p = 1 / (1 + np.exp(-margins_of(trained.classifier, torch.from_numpy(features))))
    assert p.mean() == pytest.approx(0.9, abs=0.04)


def test_members_side_by_side_give_the_mean_of_their_logits() -> None:
    train, validation = made_vectors(600, 7), made_vectors(200, 8)
    both = train_head(train, validation, replace(SETTINGS, members=2))
    first = train_head(train, validation, SETTINGS)
    second = train_head(train, validation, replace(SETTINGS, seed=1))
    assert both.classifier.hidden_layer.out_features == 2 * first.classifier.hidden_layer.out_features
    x = torch.from_numpy(validation.features)
    of_both, of_first = (margins_of(one.classifier, x) * one.temperature for one in (both, first))
    # A member's samples depend on its index, so member 1 differs from a member 0 with the same seed.
    assert second.history[0] != both.history[len(first.history)]
    assert np.corrcoef(of_both, of_first)[0, 1] > 0.9
    assert {epoch.member for epoch in both.history} == {0, 1}


def made_scores(sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated margins times `sharpness`, and the truth."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0, 2, 20_000)
    is_viral = rng.random(20_000) < 1 / (1 + np.exp(-honest))
    return sharpness * honest, is_viral


@pytest.mark.parametrize("sharpness", [4.0, 1.0, 0.5])
def test_the_temperature_is_the_overconfidence_of_scores(sharpness: float) -> None:
    margins, is_viral = made_scores(sharpness)
    weights = np.full(len(margins), 1 / len(margins))
    temperature = fit_temperature(margins, is_viral, weights)
    assert temperature == pytest.approx(sharpness, rel=0.05)
    before, after = (
        calibration_error(1 / (1 + np.exp(-margins / t)), is_viral, weights) for t in (1.0, temperature)
    )
    assert before is not None
    assert after is not None
    assert after < 0.02
    assert after <= before


def test_scores_that_separate_all_are_not_made_certain() -> None:
    margins = np.array([-1.0, -2.0, 1.0, 2.0])
    temperature = fit_temperature(margins, margins > 0, np.full(4, 0.25))
    assert temperature == pytest.approx(0.25, rel=0.01)


def test_calibrating_changes_no_call() -> None:
    torch.manual_seed(0)
    head = MLPClassifier(6).eval()
    features = torch.randn(5000, 6)
    before = head(features)
    apply_temperature(head, 3.0)
    after = head(features)
    assert torch.equal(before.argmax(1), after.argmax(1))
    torch.testing.assert_close(after, before / 3, atol=1e-6, rtol=1e-5)


TRAIN_AND_SAVE = """
import sys
from pathlib import Path
import torch
from tests.unit.training.test_trainer import SETTINGS, made_vectors
from virnuc_core.models.classifier import save_classifier
from virnuc_core.training.trainer import train_head

torch.manual_seed(int(sys.argv[2]))
torch.set_num_threads(int(sys.argv[2]))
trained = train_head(made_vectors(1000, 0), made_vectors(200, 1), SETTINGS)
save_classifier(trained.classifier, Path(sys.argv[1]), {"temperature": trained.temperature, "a": 1, "b": "x"})
assert torch.get_num_threads() == int(sys.argv[2])
"""


def test_the_same_data_give_the_same_file(tmp_path: Path) -> None:
    files = []
    for threads in (1, 2):
        path = tmp_path / f"head_{threads}.safetensors"
        root = Path(__file__).parents[3]
        subprocess.run([sys.executable, "-c", TRAIN_AND_SAVE, path, str(threads)], check=True, cwd=root)
        files.append(path.read_bytes())
    assert files[0] == files[1]
