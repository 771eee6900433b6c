"""DNABERT-S against the outputs of its authors' code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.made_models import GOLDEN
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import AttentionBackend

FOLDER = GOLDEN / "dnabert_s"


@pytest.fixture(scope="module")
def model() -> Encoder:
    return load_model(open_checkpoint(str(FOLDER), "dnabert_s"), "cpu", "fp32")


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@torch.inference_mode()
def test_hidden_states_and_means_equal_the_authors(model: Encoder, backend: AttentionBackend) -> None:
    with np.load(FOLDER / "golden.npz") as golden:
        ids, layout = torch.from_numpy(golden["input_ids"]), model.build_layout(golden["cu_seqlens"], backend)
        np.testing.assert_allclose(model(ids, layout).numpy(), golden["hidden_states"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(model.embed(ids, layout).numpy(), golden["mean_pooled"], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_means_from_strings_equal_the_authors(model: Encoder, shared_dir: Path) -> None:
    tokenizer = DnabertTokenizer(shared_dir / "golden" / "dnabert_tokenizer" / "tokenizer.json")
    with np.load(FOLDER / "golden_strings.npz") as golden:
        tokens = tokenizer.encode(ByteColumn.from_strings(golden["sequences"].tolist()))
        np.testing.assert_array_equal(tokens.num_tokens, golden["num_tokens"])
        layout = model.build_layout(tokens.offsets.astype(np.int32), "sdpa")
        means = model.embed(torch.from_numpy(tokens.input_ids), layout)
        np.testing.assert_allclose(means.numpy(), golden["mean_pooled"], rtol=0, atol=1e-5)
