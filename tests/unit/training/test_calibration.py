import numpy as np
import pytest
import torch

from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.training.calibration import cool, fit_temperature
from virnuc_core.training.metrics import calibration_error


def made_scores(sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Margins that are `sharpness` times as sure as they are right, and what is true."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0, 2, 20_000)
    is_viral = rng.random(20_000) < 1 / (1 + np.exp(-honest))
    return sharpness * honest, is_viral


@pytest.mark.parametrize("sharpness", [4.0, 1.0, 0.5])
def test_the_temperature_is_what_scores_are_too_sure_by(sharpness: float) -> None:
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
    cool(head, 3.0)
    after = head(features)
    assert torch.equal(before.argmax(1), after.argmax(1))
    torch.testing.assert_close(after, before / 3, atol=1e-6, rtol=1e-5)
