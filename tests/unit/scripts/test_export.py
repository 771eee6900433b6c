from pathlib import Path

import numpy as np
import torch

from scripts.train_bundled.export import export
from scripts.train_bundled.network import Network
from virnuc_core.models.catalogue import BUNDLED_TOKENIZER
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.contig_head import load_contig_head
from virnuc_core.models.hub import open_checkpoint


def test_an_exported_network_loads_as_what_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network(dropout=0.0, head_dropout=0.0).eval().requires_grad_(False)
    network.head.centroids = torch.eye(2, 64)
    network.head.novelty_limit.fill_(0.5)
    export(network, BUNDLED_TOKENIZER, tmp_path, {"settings": {}})
    ids = torch.randint(5, 24, (40,))
    for folder, family, model in (
        ("esm2_tiny", "esm2", network.esm2),
        ("dnabert_tiny", "dnabert_s", network.dnabert),
    ):
        loaded = load_model(open_checkpoint(str(tmp_path / folder), family), "cpu", "fp32")
        assert loaded.spec == model.spec
        layout = model.build_layout(np.array([0, 40], np.int32), "reference")
        # Stored in half precision, so equal to about three digits.
        with torch.inference_mode():
            torch.testing.assert_close(loaded(ids, layout), model(ids, layout), atol=5e-3, rtol=5e-3)
    path = tmp_path / "heads" / "tiny.safetensors"
    head = load_contig_head(path)
    assert torch.equal(head.centroids, network.head.centroids)
    assert head.novelty_limit == 0.5
    vectors, sizes = torch.randn(5, 256), torch.tensor([[100, 500]] * 5)
    torch.testing.assert_close(
        head.row_codes(vectors, vectors, sizes), network.head.row_codes(vectors, vectors, sizes)
    )
