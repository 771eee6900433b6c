"""The published classifier head against the original's probabilities."""

import numpy as np
import torch

from tests.made_models import GOLDEN
from virnuc_core.models.heads import load_head


def test_probabilities_of_the_original() -> None:
    classifier = load_head(GOLDEN / "classifier" / "pickled_module.pth")
    with np.load(GOLDEN / "classifier" / "golden.npz") as golden:
        probabilities = classifier.score_rows(torch.from_numpy(golden["features"]))["scores"].numpy()
        np.testing.assert_allclose(probabilities, golden["probabilities"], rtol=0, atol=1e-6)
