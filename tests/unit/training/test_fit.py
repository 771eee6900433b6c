"""The fit of a head and its calibration."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training import test_contigs as contigs
from tests.unit.training.test_contigs import made_runs
from virnuc_core.models.heads import MLPClassifier, load_head, save_head
from virnuc_core.settings import TrainerSettings
from virnuc_core.training.fit import (
    LabelledVectors,
    TrainedHead,
    apply_temperature,
    fit_temperature,
    is_within_bounds,
    margins_of,
    train_contig_head,
    train_head,
)

SETTINGS = TrainerSettings(epochs=8)


def made_vectors(count: int, seed: int, gap: float = 8.0) -> LabelledVectors:
    """Vectors in which the third feature tells the classes apart."""
    rng = np.random.default_rng(seed)
    is_viral = rng.random(count) < 0.5
    features = rng.normal(3, 5, (count, 8)).astype(np.float32)
    features[:, 2] += np.where(is_viral, gap, -gap)
    return LabelledVectors(features=features, is_viral=is_viral, weights=np.full(count, 1 / count))


def test_a_head_separates_what_can_be_separated(tmp_path: Path) -> None:
    trained = train_head(made_vectors(2000, 0), made_vectors(400, 1), SETTINGS, calibrate=True)
    save_head(trained.head, tmp_path / "head.safetensors")
    others = made_vectors(1000, 2)
    p = load_head(tmp_path / "head.safetensors").score_rows(torch.from_numpy(others.features))["scores"]
    assert ((p[:, 1].numpy() >= 0.5) == others.is_viral).mean() > 0.9
    losses = [epoch.validation_loss for epoch in trained.history]
    assert min(losses) == losses[trained.best_epoch - 1]


def test_frames_are_sampled_by_their_weights() -> None:
    # The same vectors are viral and other, but the viral ones are sampled 9 times as often.
    features = np.random.default_rng(6).normal(size=(2000, 4)).astype(np.float32)
    is_viral = np.arange(2000) % 2 == 0
    weights = np.where(is_viral, 0.9, 0.1) / 1000
    vectors = LabelledVectors(features=features, is_viral=is_viral, weights=weights)
    trained = train_head(vectors, vectors, SETTINGS, calibrate=True)
    p = 1 / (1 + np.exp(-margins_of(trained.head, torch.from_numpy(features))))
    assert p.mean() == pytest.approx(0.9, abs=0.04)


def test_calibrating_changes_no_call() -> None:
    torch.manual_seed(0)
    head = MLPClassifier(6).eval()
    features = torch.randn(5000, 6)
    before = head(features)
    apply_temperature(head, 3.0)
    after = head(features)
    assert torch.equal(before.argmax(1), after.argmax(1))
    torch.testing.assert_close(after, before / 3, atol=1e-6, rtol=1e-5)


def test_the_number_of_epochs() -> None:
    rng = np.random.default_rng(3)
    noise = [
        replace(made_vectors(count, 4, gap=0.0), is_viral=rng.random(count) < 0.5) for count in (500, 300)
    ]
    stopped = train_head(*noise, TrainerSettings(epochs=50), calibrate=True)
    assert len(stopped.history) == stopped.best_epoch + 5 < 50


@pytest.mark.parametrize(
    ("temperatures", "slope", "is_within"),
    [
        ((1.3,), 0.0, True),
        ((0.25001,), 0.0, False),
        ((19.999,), 0.0, False),
        ((1.3, 1.1, 1.2), -0.3, True),
        ((1.3, 1.1, 20.0), -20.0, False),
        ((1.3, 0.1, 1.0), 0.5, False),
        ((1.3, 1.1, 1.0), 20.0, False),
    ],
)
def test_a_calibration_at_its_bounds(temperatures: tuple[float, ...], slope: float, is_within: bool) -> None:
    assert is_within_bounds(*temperatures, slope=slope) == is_within


def test_a_head_that_tells_all_validation_records_apart_is_not_calibrated() -> None:
    separated = made_vectors(200, 1, gap=80.0)
    trained = train_head(separated, separated, SETTINGS, calibrate=True)
    assert trained.temperature is None
    runs, settings = made_runs(40, 0, gap=30.0), TrainerSettings(epochs=4)
    of_contigs = train_contig_head(runs, runs, contigs.SPEC, settings, calibrate=True)
    assert (of_contigs.temperature, of_contigs.contig_temperature) == (None, None)
    neutral = ("chunk_temperature", "context_temperature")
    assert [float(getattr(of_contigs.head, name)) for name in neutral] == [1.0, 1.0]


@pytest.mark.parametrize("sharpness", [4.0, 1.0, 0.5])
def test_the_temperature_is_the_overconfidence_of_scores(sharpness: float) -> None:
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 2, 20_000)
    is_viral = rng.random(20_000) < 1 / (1 + np.exp(-margins))
    weights = np.full(len(margins), 1 / len(margins))
    assert fit_temperature(sharpness * margins, is_viral, weights) == pytest.approx(sharpness, rel=0.05)
    separated = fit_temperature(margins, margins > 0, weights)
    assert separated == pytest.approx(0.25, rel=0.01), "scores that separate all are not made certain"


def fit_classifier(seed: int) -> TrainedHead:
    data = made_vectors(1000, 0), made_vectors(200, 1)
    return train_head(*data, TrainerSettings(epochs=8, seed=seed), calibrate=True)


def fit_contig_head(seed: int) -> TrainedHead:
    settings = TrainerSettings(epochs=1, seed=seed)
    return train_contig_head(made_runs(40, 0), made_runs(20, 1), contigs.SPEC, settings, calibrate=True)


@pytest.mark.parametrize("fit", [fit_classifier, fit_contig_head])
def test_the_same_data_give_the_same_file_with_any_number_of_threads(
    fit: Callable[[int], TrainedHead], tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    files = []
    try:
        for threads, seed in ((1, 0), (2, 0), (1, 1)):
            torch.manual_seed(threads)
            torch.set_num_threads(threads)
            trained = fit(seed)
            assert torch.get_num_threads() == threads
            save_head(trained.head, tmp_path / "head.safetensors", {"temperature": trained.temperature})
            files.append((tmp_path / "head.safetensors").read_bytes())
    finally:
        torch.set_num_threads(before)
    assert files[0] == files[1] != files[2]
