"""A sequence gets the same vector in any packing, order and budget."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_models import make_spec
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.models.checkpoint import build_model
from virnuc_core.models.encoders import Encoder, mean_pool
from virnuc_core.specs import AttentionBackend, Family

FAMILIES: tuple[Family, ...] = ("esm2", "dnabert_s")


@cache
def made_model(family: Family) -> Encoder:
    """Two layers, with weights large enough for attention to matter."""
    torch.manual_seed(1)
    spec = make_spec(family, embedding_dim=48, num_heads=3, ffn_dim=96, vocab_size=33, layer_norm_eps=1e-5)
    model = build_model(spec).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@torch.inference_mode()
def embed(model: Encoder, tokens: TokenColumn, budget: int, backend: AttentionBackend) -> torch.Tensor:
    """One mean vector per sequence, in the order of the column."""
    vectors = torch.zeros(len(tokens), model.spec.embedding_dim)
    for rows in pack(tokens.num_tokens, budget).batches:
        batch = tokens.take(rows)
        layout = model.build_layout(batch.cu_seqlens, backend)
        hidden_states = model(torch.from_numpy(batch.input_ids), layout)
        pooled = mean_pool(
            hidden_states, layout.cu_seqlens, include_special_tokens=model.spec.family == "dnabert_s"
        )
        vectors[torch.from_numpy(rows)] = pooled
    return vectors


@pytest.mark.parametrize("family", FAMILIES)
@given(
    lengths=st.lists(st.integers(min_value=3, max_value=60), min_size=1, max_size=20),
    budget=st.integers(min_value=3, max_value=400),
    seed=st.integers(min_value=0, max_value=999),
)
@settings(max_examples=30)
def test_packed_equals_one_at_a_time(family: Family, lengths: list[int], budget: int, seed: int) -> None:
    model = made_model(family)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.random.default_rng(seed).integers(4, 33, offsets[-1], dtype=np.int32)
    tokens = TokenColumn(ids, offsets)
    packed = embed(model, tokens, budget, "sdpa")
    single = embed(model, tokens, 1, "reference")
    torch.testing.assert_close(packed, single, rtol=0, atol=1e-5)
