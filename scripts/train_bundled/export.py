"""Writes the trained models and their head in the layouts that virnuc_core loads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.train_bundled.network import Network
from virnuc_core.models.catalogue import index_path
from virnuc_core.models.checkpoint import DNABERT, TOKEN_TYPE, TRANSFORMERS_ESM, KeyLayout, config_sizes
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.models.contig_head import save_contig_head
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.hub import SUMS_NAME, write_sums
from virnuc_core.results.nearest import GenomeIndex, save_index
from virnuc_core.specs import ModelSpec


def export(
    network: Network, tokenizer: Path, folder: Path, settings: dict[str, Any], index: GenomeIndex
) -> None:
    """Writes esm2_tiny/ as transformers does, dnabert_tiny/ as its authors do, and heads/ with the index; weights are fp16, heads fp32."""
    for name, encoder, config in (
        ("esm2_tiny", network.esm2, _esm2_config(network.esm2.spec)),
        ("dnabert_tiny", network.dnabert, _dnabert_config(network.dnabert.spec)),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        tensors = published_tensors(encoder)
        half = {key: tensor.detach().half().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(half, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if encoder is network.dnabert:
            shutil.copyfile(tokenizer, folder / name / "tokenizer.json")
        write_sums(folder / name, (path for path in (folder / name).iterdir() if path.name != SUMS_NAME))
    (folder / "heads").mkdir(exist_ok=True)
    head = folder / "heads" / "tiny.safetensors"
    save_contig_head(network.head, head, {"training": settings})
    save_index(replace(index, head=classifier_fingerprint(head)), index_path(head))
    write_sums(folder / "heads", (folder / "heads").glob("*.safetensors"))


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
