from pathlib import Path

import numpy as np
import torch

from scripts.train_bundled.export import export
from scripts.train_bundled.network import TinyPair
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.hub import open_checkpoint


def hidden_states(model: Encoder, num_tokens: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocab_size, (num_tokens,), generator=generator)
    layout = model.build_layout(np.array([0, num_tokens], np.int32), "reference")
    with torch.inference_mode():
        return model(ids, layout)


def test_an_exported_pair_loads_as_what_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = TinyPair((300,), num_classes=3, dropout=0.0).eval()
    export(pair, tmp_path)
    for folder, family, model, vocab_size in (
        ("esm2_tiny", "esm2", pair.esm2, 24),
        ("dnabert_tiny", "dnabert_s", pair.dnabert, 4096),
    ):
        loaded = load_model(open_checkpoint(str(tmp_path / folder), family), "cpu", "fp32")
        assert loaded.spec == model.spec
        # Stored in half precision, so equal to about three digits.
        torch.testing.assert_close(
            hidden_states(loaded, 40, vocab_size), hidden_states(model, 40, vocab_size), atol=5e-3, rtol=5e-3
        )
    features = torch.randn(5, 512)
    head = load_classifier(tmp_path / "heads" / "tiny_300.safetensors")
    torch.testing.assert_close(
        head.virus_probabilities(features), pair.logits(features, 300).softmax(-1), atol=1e-6, rtol=1e-6
    )
