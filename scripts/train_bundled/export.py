"""Writes the trained models and their head in the layouts that virnuc_core loads, and reads them for a further training."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.train_bundled.network import Network
from virnuc_core.models.checkpoint import (
    DNABERT,
    TOKEN_TYPE,
    TRANSFORMERS_ESM,
    Checkpoint,
    KeyLayout,
    config_sizes,
    read_weights,
)
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.heads import load_head, save_head
from virnuc_core.models.hub import write_sums
from virnuc_core.specs import ModelSpec

_ESM2: Final = "esm2_tiny"
_DNABERT: Final = "dnabert_tiny"
TOKENIZER: Final = f"{_DNABERT}/tokenizer.json"
_HEAD: Final = "heads/tiny.safetensors"


def export(network: Network, tokenizer: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Writes esm2_tiny/ as transformers does, dnabert_tiny/ as its authors do, and heads/; weights are fp16, heads fp32."""
    for name, encoder, config in (
        (_ESM2, network.esm2, _esm2_config(network.esm2.spec)),
        (_DNABERT, network.dnabert, _dnabert_config(network.dnabert.spec)),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        tensors = published_tensors(encoder)
        half = {key: tensor.detach().half().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(half, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if encoder is network.dnabert:
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        write_sums(folder / name)
    head = folder / _HEAD
    head.parent.mkdir(exist_ok=True)
    save_head(network.head, head, {"training": settings})
    write_sums(head.parent)


def load_exported(network: Network, folder: Path) -> None:
    """Takes the weights of models and head, on the CPU, from a folder that `export` wrote; of more layers, the first ones.

    Masked-token heads, temperatures and centroids begin anew.
    """
    for name, encoder in ((_ESM2, network.esm2), (_DNABERT, network.dnabert)):
        checkpoint = Checkpoint.open(folder / name, encoder.spec.family, name=name)
        weights = read_weights(checkpoint, "cpu", torch.float32)
        encoder.load_state_dict({key: weights[key] for key in encoder.state_dict()})
    weights = dict(load_head(folder / _HEAD).named_parameters())
    network.head.load_state_dict(weights, strict=False)


def published_tensors(model: Encoder) -> dict[str, Tensor]:
    """The parameters of a model under their published names: the inverse of reading a checkpoint."""
    layout: KeyLayout = TRANSFORMERS_ESM if model.spec.family == "esm2" else DNABERT
    prefix = "esm." if model.spec.family == "esm2" else ""
    tensors = {}
    for name, parameter in model.named_parameters():
        value: Tensor = parameter
        if name == TOKEN_TYPE:
            value = torch.stack((parameter, torch.zeros_like(parameter)))
        elif ".qkv." in name and model.spec.family == "esm2":
            value = unpair_rows(parameter, model.spec.num_heads)
        sources = layout.sources(name)
        for source, rows in zip(sources, value.chunk(len(sources)), strict=True):
            tensors[prefix + source] = rows
    return tensors


def unpair_rows(qkv: Tensor, num_heads: int) -> Tensor:
    """The inverse of `positions.pair_rows`: the row order of published weights."""
    queries_keys, values = qkv.tensor_split([2 * len(qkv) // 3])
    halves = queries_keys.unflatten(0, (2 * num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((halves, values))


def _esm2_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        **config_sizes(spec),
        "position_embedding_type": "rotary",
        "token_dropout": spec.token_dropout,
        "emb_layer_norm_before": False,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "torch_dtype": "float16",
    }


def _dnabert_config(spec: ModelSpec) -> dict[str, object]:
    names = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    return {**names, **config_sizes(spec), "type_vocab_size": 2, "pad_token_id": 3, "torch_dtype": "float16"}
