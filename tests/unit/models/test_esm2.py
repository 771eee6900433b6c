import numpy as np
import pytest
import torch

from virnuc_core.errors import UsageError
from virnuc_core.models.encoder import mean_pool, validate_repr_layer
from virnuc_core.models.esm2 import ESM2, MASK_TOKEN
from virnuc_core.specs import ModelSpec

SPEC = ModelSpec(
    family="esm2",
    num_layers=2,
    embedding_dim=32,
    num_heads=2,
    ffn_dim=64,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
CU_SEQLENS = np.array([0, 6, 13], np.int32)


@pytest.fixture
def model() -> ESM2:
    torch.manual_seed(0)
    return ESM2(SPEC).eval()


def _ids() -> torch.Tensor:
    return torch.tensor([0, 5, 6, 7, 8, 2, 0, 9, 10, 11, 12, 13, 2], dtype=torch.int32)


@torch.inference_mode()
def test_embeddings_are_scaled_to_the_visible_share(model: ESM2) -> None:
    ids = _ids()
    ids[8] = ids[10] = MASK_TOKEN
    states = model(ids, model.build_layout(CU_SEQLENS, "sdpa"), 0)
    table = model.embed_tokens.weight
    torch.testing.assert_close(states[:6], table[ids[:6]] * 0.88)
    expected = table[ids[6:]] * (0.88 / (1 - 2 / 7))
    expected[[2, 4]] = 0.0
    torch.testing.assert_close(states[6:], expected)


def test_a_layer_that_does_not_exist_is_refused(model: ESM2) -> None:
    for wrong in (-1, 3):
        with pytest.raises(UsageError, match=r"choose 0 \(embeddings\) to 2"):
            model(_ids(), model.build_layout(CU_SEQLENS, "sdpa"), wrong)
    assert [validate_repr_layer(SPEC, n) for n in (None, 0, 1, 2)] == [2, 0, 1, 2]


@torch.inference_mode()
def test_only_the_last_layer_is_normed(model: ESM2) -> None:
    layout = model.build_layout(CU_SEQLENS, "sdpa")
    last = model(_ids(), layout)
    torch.testing.assert_close(last, model(_ids(), layout, 2))
    torch.testing.assert_close(last.mean(1), torch.zeros(13), atol=1e-6, rtol=0)
    assert model(_ids(), layout, 1).mean(1).abs().max() > 1e-4


def test_it_trains() -> None:
    torch.manual_seed(0)
    model = ESM2(SPEC, dropout=0.1).train()
    head = torch.nn.Linear(32, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(30):
        layout = model.build_layout(CU_SEQLENS, "sdpa")
        pooled = mean_pool(model(_ids(), layout), layout.cu_seqlens, include_special_tokens=False)
        loss = torch.nn.functional.cross_entropy(head(pooled), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.1 * losses[0]


@torch.inference_mode()
def test_bf16_stays_close_to_fp32(model: ESM2) -> None:
    layout = model.build_layout(CU_SEQLENS, "sdpa")
    exact = mean_pool(model(_ids(), layout), layout.cu_seqlens, include_special_tokens=False)
    model.bfloat16()
    layout = model.build_layout(CU_SEQLENS, "sdpa")
    rounded = mean_pool(model(_ids(), layout), layout.cu_seqlens, include_special_tokens=False)
    assert torch.nn.functional.cosine_similarity(exact, rounded).min() > 0.999
