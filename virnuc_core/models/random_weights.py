"""Weights drawn at random for a published architecture: the true speed and memory, and meaningless vectors.

A benchmark needs no download of gigabytes: the time of a matrix product does not depend on what was learnt.
It does depend on the scale of the numbers (a card under its power limit multiplies zeros faster), so the
weights have about the spread of trained ones.
"""

from typing import Final

import torch
from torch import Tensor

from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.models.catalogue import CatalogueEntry
from virnuc_core.models.key_mapping import parameter_shapes
from virnuc_core.specs import ModelSpec

_SEED: Final = 0
_STD: Final = 0.02
_FFN_OVER_WIDTH: Final = 4
_DNABERT_VOCABULARY: Final = 4096
_LAYER_NORM_EPS: Final = {"esm2": 1e-5, "dnabert_s": 1e-12}


def published_spec(entry: CatalogueEntry) -> ModelSpec:
    """The architecture of a model on the hub, without asking the hub.

    Source: the config.json of each repository in the catalogue.
    """
    is_protein = entry.family == "esm2"
    return ModelSpec(
        family=entry.family,
        num_layers=entry.num_layers,
        embedding_dim=entry.embedding_dim,
        num_heads=entry.num_heads,
        ffn_dim=_FFN_OVER_WIDTH * entry.embedding_dim,
        vocab_size=Esm2Tokenizer.vocab_size if is_protein else _DNABERT_VOCABULARY,
        layer_norm_eps=_LAYER_NORM_EPS[entry.family],
        token_dropout=is_protein,
    )


def random_state_dict(spec: ModelSpec, device: torch.device | str) -> dict[str, Tensor]:
    """All parameters of a model, fp32, drawn on `device`; the same numbers on every device of a kind.

    Gains of LayerNorm are about 1, everything else is normal with a standard deviation of 0.02.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    state = {}
    for name, shape in parameter_shapes(spec).items():
        values = torch.empty(shape, device=device).normal_(std=_STD, generator=generator)
        state[name] = values + 1 if name.endswith("norm.weight") else values
    return state
