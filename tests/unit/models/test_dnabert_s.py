import numpy as np
import pytest
import torch

from virnuc_core.errors import UsageError
from virnuc_core.models.dnabert_s import DnabertS
from virnuc_core.models.encoder import mean_pool
from virnuc_core.specs import ModelSpec

SPEC = ModelSpec(
    family="dnabert_s",
    num_layers=2,
    embedding_dim=36,
    num_heads=3,
    ffn_dim=48,
    vocab_size=64,
    layer_norm_eps=1e-12,
)
CU_SEQLENS = np.array([0, 5, 12], np.int32)
IDS = torch.tensor([1, 5, 6, 7, 2, 1, 9, 10, 11, 12, 13, 2])


@torch.inference_mode()
def test_embedding_adds_the_token_type_and_is_normed() -> None:
    torch.manual_seed(0)
    model = DnabertS(SPEC).eval()
    torch.nn.init.normal_(model.token_type_embedding)
    states = model(IDS, model.build_layout(CU_SEQLENS, "sdpa"), 0)
    expected = model.word_embeddings.weight[IDS] + model.token_type_embedding
    expected = (expected - expected.mean(1, keepdim=True)) / expected.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(states, expected)


@torch.inference_mode()
def test_repr_layer_stops_early() -> None:
    model = DnabertS(SPEC).eval()
    layout = model.build_layout(CU_SEQLENS, "sdpa")
    first = model(IDS, layout, 1)
    second, _ = model.layers[1](first, first, layout)
    torch.testing.assert_close(model(IDS, layout, 2), second, rtol=0, atol=0)
    with pytest.raises(UsageError, match="representation layer 3 does not exist"):
        model(IDS, layout, 3)


def test_it_trains() -> None:
    torch.manual_seed(0)
    model = DnabertS(SPEC, dropout=0.1).train()
    head = torch.nn.Linear(36, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=5e-3)
    losses = []
    for _ in range(40):
        layout = model.build_layout(CU_SEQLENS, "sdpa")
        pooled = mean_pool(model(IDS, layout), layout.cu_seqlens, include_special_tokens=True)
        loss = torch.nn.functional.cross_entropy(head(pooled), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.1 * losses[0]
