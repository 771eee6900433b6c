"""The published classifier head against the original's probabilities."""

import numpy as np
import torch

from tests.made_models import GOLDEN
from virnuc_core.models.classifier import load_classifier


def test_probabilities_of_the_original() -> None:
    classifier = load_classifier(GOLDEN / "classifier" / "pickled_module.pth")
    with np.load(GOLDEN / "classifier" / "golden.npz") as golden:
        probabilities = classifier.virus_probabilities(torch.from_numpy(golden["features"])).numpy()
        np.testing.assert_allclose(probabilities, golden["probabilities"], rtol=0, atol=1e-6)
