from pathlib import Path

import numpy as np
import torch

from scripts.train_bundled.export import export
from scripts.train_bundled.network import TinyPair
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.hub import open_checkpoint


def test_an_exported_pair_loads_as_what_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = TinyPair((300,), num_classes=3, dropout=0.0).eval()
    export(pair, tmp_path)
    ids = torch.randint(5, 24, (40,))
    for folder, family, model in (
        ("esm2_tiny", "esm2", pair.esm2),
        ("dnabert_tiny", "dnabert_s", pair.dnabert),
    ):
        loaded = load_model(open_checkpoint(str(tmp_path / folder), family), "cpu", "fp32")
        assert loaded.spec == model.spec
        layout = model.build_layout(np.array([0, 40], np.int32), "reference")
        # Stored in half precision, so equal to about three digits.
        with torch.inference_mode():
            torch.testing.assert_close(loaded(ids, layout), model(ids, layout), atol=5e-3, rtol=5e-3)
    features = torch.randn(5, 512)
    head = load_classifier(tmp_path / "heads" / "tiny_300.safetensors")
    expected = pair.head(300)(features).softmax(-1)
    torch.testing.assert_close(head.virus_probabilities(features), expected, atol=1e-6, rtol=1e-6)
