from pathlib import Path

import numpy as np
import torch

from scripts.train_bundled.export import save_head
from scripts.train_bundled.heads import HeadSettings, fit_head
from virnuc_core.models.classifier import load_classifier

SETTINGS = HeadSettings(members=2, epochs=10)


def test_a_fitted_head_separates_what_can_be_separated(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(2000) < 0.5
    features = rng.normal(3, 5, (2000, 8)).astype(np.float32)
    features[:, 2] += np.where(labels, 10, -10)
    head = fit_head(features, labels, SETTINGS)
    save_head(head, tmp_path / "head.safetensors")
    probabilities = load_classifier(tmp_path / "head.safetensors").virus_probabilities(
        torch.from_numpy(features)
    )
    assert ((probabilities[:, 1].numpy() >= 0.5) == labels).mean() > 0.95


def test_members_side_by_side_give_the_mean_of_their_logits() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(0, 1, (600, 6)).astype(np.float32)
    labels = features[:, 0] > 0
    both = fit_head(features, labels, SETTINGS)
    first = fit_head(features, labels, HeadSettings(members=1, epochs=10))
    assert both.hidden_layer.out_features == 2 * first.hidden_layer.out_features
    x = torch.from_numpy(features)
    with torch.no_grad():
        second = 2 * both(x) - first(x)
    assert ((second[:, 1] > second[:, 0]).numpy() == labels).mean() > 0.9
