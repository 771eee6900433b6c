"""ESM-2 of other programs in a given architecture, with fresh weights; their packages are imported on use."""

from typing import Any

import torch
from torch import nn

from virnuc_core.specs import ModelSpec

PAD = 1
_MASK = 32


def fair_esm_model(spec: ModelSpec, device: str) -> Any:
    """fair-esm's own class, in evaluation mode."""
    import esm

    with torch.device(device):
        model = esm.model.esm2.ESM2(
            num_layers=spec.num_layers,
            embed_dim=spec.embedding_dim,
            attention_heads=spec.num_heads,
            alphabet="ESM-1b",
            token_dropout=True,
        )
    return model.eval()


def hugging_face_model(spec: ModelSpec, device: str) -> nn.Module:
    """EsmModel of transformers with its default (SDPA) attention, in evaluation mode."""
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(
        vocab_size=spec.vocab_size,
        mask_token_id=_MASK,
        pad_token_id=PAD,
        hidden_size=spec.embedding_dim,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        intermediate_size=spec.ffn_dim,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
    )
    with torch.device(device):
        model: nn.Module = EsmModel(config, add_pooling_layer=False)
    return model.eval()
