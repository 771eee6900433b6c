"""Exports the trained pair in published layouts: ESM-2 as in transformers, DNABERT-S as by its authors."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.train_bundled.network import DNABERT_SPEC, ESM2_SPEC, TinyPair
from virnuc_core.models.classifier import save_classifier
from virnuc_core.models.hub import SUMS_NAME, write_sums

_ESM2_LAYER = {
    "attention_norm": "attention.LayerNorm",
    "attention_out": "attention.output.dense",
    "ffn_norm": "LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
}
_DNABERT_LAYER = {
    "qkv": "attention.self.Wqkv",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "mlp.gated_layers",
    "ffn_out": "mlp.wo",
    "ffn_norm": "mlp.layernorm",
}


def export(model: TinyPair, folder: Path) -> None:
    """Writes esm2_tiny/, dnabert_tiny/ and heads/ under `folder`; weights are fp16, heads fp32."""
    for name, tensors, config in (
        ("esm2_tiny", _esm2_tensors(model), _esm2_config()),
        ("dnabert_tiny", _dnabert_tensors(model), _dnabert_config()),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        half = {key: tensor.detach().half().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(half, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_sums(folder / name, (path for path in (folder / name).iterdir() if path.name != SUMS_NAME))
    (folder / "heads").mkdir(exist_ok=True)
    for chunk_length in model.heads:
        save_classifier(model.head(int(chunk_length)), folder / "heads" / f"tiny_{chunk_length}.safetensors")
    write_sums(folder / "heads", (folder / "heads").glob("*.safetensors"))


def _esm2_tensors(model: TinyPair) -> dict[str, Tensor]:
    tensors = {"esm.embeddings.word_embeddings.weight": model.esm2.embed_tokens.weight}
    for i, layer in enumerate(model.esm2.layers):
        prefix = f"esm.encoder.layer.{i}."
        for kind in ("weight", "bias"):
            published = unpair_rows(getattr(layer.qkv, kind), ESM2_SPEC.num_heads).chunk(3)
            for part, rows in zip(("query", "key", "value"), published, strict=True):
                tensors[f"{prefix}attention.self.{part}.{kind}"] = rows
            for ours, theirs in _ESM2_LAYER.items():
                tensors[f"{prefix}{theirs}.{kind}"] = getattr(getattr(layer, ours), kind)
    for kind in ("weight", "bias"):
        tensors[f"esm.encoder.emb_layer_norm_after.{kind}"] = getattr(model.esm2.final_norm, kind)
    return tensors


def unpair_rows(qkv: Tensor, num_heads: int) -> Tensor:
    """The inverse of `positions.pair_rows`: the row order of published weights."""
    queries_keys, values = qkv.tensor_split([2 * len(qkv) // 3])
    halves = queries_keys.unflatten(0, (2 * num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((halves, values))


def _dnabert_tensors(model: TinyPair) -> dict[str, Tensor]:
    token_type = torch.zeros(2, DNABERT_SPEC.embedding_dim)
    token_type[0] = model.dnabert.token_type_embedding.detach().cpu()
    tensors = {
        "embeddings.word_embeddings.weight": model.dnabert.word_embeddings.weight,
        "embeddings.token_type_embeddings.weight": token_type,
    }
    for kind in ("weight", "bias"):
        tensors[f"embeddings.LayerNorm.{kind}"] = getattr(model.dnabert.embedding_norm, kind)
    for i, layer in enumerate(model.dnabert.layers):
        for ours, theirs in _DNABERT_LAYER.items():
            for kind, tensor in getattr(layer, ours).named_parameters():
                tensors[f"encoder.layer.{i}.{theirs}.{kind}"] = tensor
    return tensors


def _esm2_config() -> dict[str, object]:
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        "vocab_size": ESM2_SPEC.vocab_size,
        "hidden_size": ESM2_SPEC.embedding_dim,
        "num_hidden_layers": ESM2_SPEC.num_layers,
        "num_attention_heads": ESM2_SPEC.num_heads,
        "intermediate_size": ESM2_SPEC.ffn_dim,
        "layer_norm_eps": ESM2_SPEC.layer_norm_eps,
        "position_embedding_type": "rotary",
        "token_dropout": ESM2_SPEC.token_dropout,
        "emb_layer_norm_before": False,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "torch_dtype": "float16",
    }


def _dnabert_config() -> dict[str, object]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": DNABERT_SPEC.vocab_size,
        "hidden_size": DNABERT_SPEC.embedding_dim,
        "num_hidden_layers": DNABERT_SPEC.num_layers,
        "num_attention_heads": DNABERT_SPEC.num_heads,
        "intermediate_size": DNABERT_SPEC.ffn_dim,
        "layer_norm_eps": DNABERT_SPEC.layer_norm_eps,
        "type_vocab_size": 2,
        "pad_token_id": 3,
        "torch_dtype": "float16",
    }
