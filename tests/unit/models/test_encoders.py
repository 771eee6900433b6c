"""ESM-2 and DNABERT-S beyond what the golden vectors show: layers, means, training."""

import numpy as np
import pytest
import torch

from virnuc_core.models.catalogue import BUNDLED_HEADS
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import mean_pool
from virnuc_core.models.heads import load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family, ResolvedPrecision

CU_SEQLENS = np.array([0, 6, 13], np.int32)
IDS = torch.tensor([0, 5, 6, 7, 8, 2, 0, 9, 10, 11, 12, 13, 2], dtype=torch.int32)
each_family = pytest.mark.parametrize("family", ["esm2", "dnabert_s"])


def random_sequences(vocab_size: int) -> tuple[torch.Tensor, np.ndarray]:
    """Sequences of 3 to 172 tokens."""
    lengths = np.random.default_rng(0).integers(3, 173, size=30)
    ids = np.random.default_rng(1).integers(5, vocab_size, size=lengths.sum()).astype(np.int32)
    return torch.from_numpy(ids), np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@torch.inference_mode()
def test_vectors_and_scores_in_bf16_are_those_in_fp32() -> None:
    """Of the bundled models."""
    vectors: dict[ResolvedPrecision, list[torch.Tensor]] = {"fp32": [], "bf16": []}
    for precision, found in vectors.items():
        sizes: dict[Family, int] = {"dnabert_s": 4096, "esm2": 24}
        for family, vocab_size in sizes.items():
            model = load_model(open_checkpoint("tiny", family), "cpu", precision)
            ids, cu_seqlens = random_sequences(vocab_size)
            found.append(model.embed(ids, model.build_layout(cu_seqlens, "sdpa")))
    for exact, close in zip(*vectors.values(), strict=True):
        assert 0.9995 < torch.cosine_similarity(exact, close).min() < 1
    head = load_head(BUNDLED_HEADS["tiny"])
    sizes_of_rows = torch.tensor([[100, 500]]).expand(len(exact), 2)
    exact_p, close_p = (
        head.score_rows(torch.cat(found, dim=1), sizes_of_rows)["scores"][:, 1] for found in vectors.values()
    )
    torch.testing.assert_close(close_p, exact_p, rtol=0, atol=0.02)


@torch.inference_mode()
@each_family
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch itself
def test_compiled_layers_give_the_same_vectors_for_any_batch(family: Family) -> None:
    checkpoint = open_checkpoint("tiny", family)
    plain, compiled = (
        load_model(checkpoint, "cpu", "fp32"),
        load_model(checkpoint, "cpu", "fp32", compiled=True),
    )
    for tokens in (6, 40, 173):
        ids = torch.arange(5, 5 + 19).repeat(10)[:tokens].int()
        layout = plain.build_layout(np.array([0, tokens // 2, tokens], np.int32), "sdpa")
        torch.testing.assert_close(compiled.embed(ids, layout), plain.embed(ids, layout), rtol=0, atol=2e-5)


@pytest.mark.parametrize("specials", [True, False])
def test_means_of_sequences_of_any_length(specials: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(12, 5, generator=generator, requires_grad=True)
    bounds = torch.tensor([0, 4, 6, 7, 7, 12], dtype=torch.int32)
    means = mean_pool(hidden_states, bounds, include_special_tokens=specials)
    trim = 0 if specials else 1
    for mean, begin, end in zip(means, bounds[:-1], bounds[1:], strict=True):
        part = hidden_states[begin + trim : end - trim]
        torch.testing.assert_close(mean, part.mean(0) if end - begin > 2 * trim else torch.zeros(5))
    means.sum().backward()
    assert hidden_states.grad is not None
    assert hidden_states.grad[:4, 0].tolist() == ([0.25] * 4 if specials else [0, 0.5, 0.5, 0])


def test_means_are_summed_in_fp32() -> None:
    hidden_states = torch.full((4096, 2), 40.0, dtype=torch.float16)
    means = mean_pool(hidden_states, torch.tensor([0, 4096]), include_special_tokens=True)
    torch.testing.assert_close(means, torch.full((1, 2), 40.0))
