"""ESM-2 and DNABERT-S beyond what the golden vectors show: masked tokens, layers, means, training."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from virnuc_core.errors import UsageError
from virnuc_core.models.dnabert_s import DnabertS
from virnuc_core.models.encoder import Encoder, mean_pool, validate_repr_layer
from virnuc_core.models.esm2 import ESM2, MASK_TOKEN
from virnuc_core.specs import ModelSpec

SPEC = ModelSpec(
    family="esm2",
    num_layers=2,
    embedding_dim=36,
    num_heads=3,
    ffn_dim=48,
    vocab_size=64,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
MODELS = [(ESM2, SPEC), (DnabertS, replace(SPEC, family="dnabert_s", token_dropout=False))]
CU_SEQLENS = np.array([0, 6, 13], np.int32)
IDS = torch.tensor([0, 5, 6, 7, 8, 2, 0, 9, 10, 11, 12, 13, 2], dtype=torch.int32)
BOUNDS = torch.tensor([0, 4, 6, 7, 7, 12], dtype=torch.int32)
HIDDEN_STATES = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_embeddings_are_scaled_to_the_visible_share() -> None:
    model = ESM2(SPEC).eval()
    ids = IDS.clone()
    ids[8] = ids[10] = MASK_TOKEN
    states = model(ids, model.build_layout(CU_SEQLENS, "sdpa"), 0)
    table = model.embed_tokens.weight
    torch.testing.assert_close(states[:6], table[ids[:6]] * 0.88)
    expected = table[ids[6:]] * (0.88 / (1 - 2 / 7))
    expected[[2, 4]] = 0.0
    torch.testing.assert_close(states[6:], expected)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "spec"), MODELS)
def test_layers_are_counted_from_the_embeddings(kind: type[Encoder], spec: ModelSpec) -> None:
    model = kind(spec).eval()
    layout = model.build_layout(CU_SEQLENS, "sdpa")
    torch.testing.assert_close(model(IDS, layout), model(IDS, layout, 2), rtol=0, atol=0)
    assert not torch.allclose(model(IDS, layout, 1), model(IDS, layout, 2))
    for wrong in (-1, 3):
        with pytest.raises(UsageError, match=rf"layer {wrong} does not .*choose 0 \(embeddings\) to 2"):
            model(IDS, layout, wrong)
    assert [validate_repr_layer(spec, n) for n in (None, 0, 1, 2)] == [2, 0, 1, 2]


@pytest.mark.parametrize(("kind", "spec"), MODELS)
def test_it_trains(kind: type[Encoder], spec: ModelSpec) -> None:
    torch.manual_seed(0)
    model = kind(spec, dropout=0.1).train()
    head = torch.nn.Linear(spec.embedding_dim, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=5e-3)
    losses = []
    for _ in range(40):
        layout = model.build_layout(CU_SEQLENS, "sdpa")
        pooled = mean_pool(model(IDS, layout), layout.cu_seqlens, include_special_tokens=False)
        loss = torch.nn.functional.cross_entropy(head(pooled), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("specials", [True, False])
def test_means_of_sequences_of_any_length(specials: bool) -> None:
    hidden_states = HIDDEN_STATES.clone().requires_grad_()
    means = mean_pool(hidden_states, BOUNDS, include_special_tokens=specials)
    trim = 0 if specials else 1
    for mean, begin, end in zip(means, BOUNDS[:-1], BOUNDS[1:], strict=True):
        part = HIDDEN_STATES[begin + trim : end - trim]
        torch.testing.assert_close(mean, part.mean(0) if end - begin > 2 * trim else torch.zeros(5))
    means.sum().backward()
    assert hidden_states.grad is not None
    assert hidden_states.grad[:4, 0].tolist() == ([0.25] * 4 if specials else [0, 0.5, 0.5, 0])


@pytest.mark.parametrize("specials", [True, False])
def test_a_mean_does_not_depend_on_batch_mates(specials: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randn(50, 7, generator=generator)
    alone = mean_pool(sequence, torch.tensor([0, 50]), include_special_tokens=specials)
    mates = 1e4 * torch.randn(90, 7, generator=generator)
    packed = torch.cat((mates[:33], sequence, mates[33:]))
    together = mean_pool(packed, torch.tensor([0, 33, 83, 140]), include_special_tokens=specials)
    assert torch.equal(together[1], alone[0])


def test_means_are_summed_in_fp32() -> None:
    hidden_states = torch.full((4096, 2), 40.0, dtype=torch.float16)
    means = mean_pool(hidden_states, torch.tensor([0, 4096]), include_special_tokens=True)
    torch.testing.assert_close(means, torch.full((1, 2), 40.0))
