"""The published classifier head against the original's probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from virnuc_core.models.classifier import MLPClassifier, load_classifier

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "classifier"


def pickled_module(folder: Path) -> Path:
    return GOLDEN / "pickled_module.pth"


def state_dict(folder: Path) -> Path:
    torch.save(load_classifier(GOLDEN / "pickled_module.pth").state_dict(), folder / "head.pth")
    return folder / "head.pth"


def safetensors(folder: Path) -> Path:
    state = load_classifier(GOLDEN / "pickled_module.pth").state_dict()
    del state["bn1.num_batches_tracked"]
    save_file(state, folder / "head.safetensors", metadata={"format": "pt"})
    return folder / "head.safetensors"


@pytest.mark.parametrize("make", [pickled_module, state_dict, safetensors])
def test_probabilities_of_the_original(make: object, tmp_path: Path) -> None:
    assert callable(make)
    golden = np.load(GOLDEN / "golden.npz")
    classifier = load_classifier(make(tmp_path))
    assert isinstance(classifier, MLPClassifier)
    assert classifier.in_features == golden["features"].shape[1]
    probabilities = classifier.virus_probabilities(torch.from_numpy(golden["features"])).numpy()
    np.testing.assert_allclose(probabilities, golden["probabilities"], rtol=0, atol=1e-6)
