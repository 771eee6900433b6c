"""Writes the trained pair in published layouts, and measures it on held-out frames with the code of a run."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.train_bundled.data import Genomes, TokenizedFrames, tokenized_frames
from scripts.train_bundled.network import TinyPair
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, TokenColumn
from virnuc_core.inference.device import default_token_budget
from virnuc_core.models.checkpoint import (
    DNABERT,
    TOKEN_TYPE,
    TRANSFORMERS_ESM,
    KeyLayout,
    config_sizes,
    load_model,
)
from virnuc_core.models.classifier import load_classifier, save_classifier
from virnuc_core.models.encoder import Encoder, mean_pool
from virnuc_core.models.hub import SUMS_NAME, open_checkpoint, write_sums
from virnuc_core.results.calls import call_chunks
from virnuc_core.specs import Family, ModelSpec
from virnuc_core.training.metrics import KnownCalls, measure


def export(model: TinyPair, folder: Path) -> None:
    """Writes esm2_tiny/ as transformers does, dnabert_tiny/ as its authors do, and heads/; weights are fp16, heads fp32."""
    for name, encoder, config in (
        ("esm2_tiny", model.esm2, _esm2_config(model.esm2.spec)),
        ("dnabert_tiny", model.dnabert, _dnabert_config(model.dnabert.spec)),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        tensors = published_tensors(encoder)
        half = {key: tensor.detach().half().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(half, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_sums(folder / name, (path for path in (folder / name).iterdir() if path.name != SUMS_NAME))
    (folder / "heads").mkdir(exist_ok=True)
    for chunk_length in model.heads:
        save_classifier(model.head(int(chunk_length)), folder / "heads" / f"tiny_{chunk_length}.safetensors")
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


def frame_features(bundle: Path, frames: TokenizedFrames, device: str) -> npt.NDArray[np.float32]:
    """Classifier features fp32 (F, D_dna + D_protein) of every frame."""
    dna = _vectors(bundle / "dnabert_tiny", "dnabert_s", frames.dna, device)
    protein = _vectors(bundle / "esm2_tiny", "esm2", frames.protein, device)
    return np.concatenate([dna, protein], axis=1)


@torch.inference_mode()
def _vectors(folder: Path, family: Family, tokens: TokenColumn, device: str) -> npt.NDArray[np.float32]:
    model = load_model(open_checkpoint(str(folder), family), device, "fp32")
    vectors = np.empty((len(tokens), model.spec.embedding_dim), np.float32)
    special = model.pools_special_tokens
    for rows in pack(tokens.num_tokens, default_token_budget(model.spec, "fp32", device)).batches:
        batch = tokens.take(rows)
        layout = model.build_layout(batch.cu_seqlens, "sdpa")
        hidden_states = model(torch.from_numpy(batch.input_ids).to(device), layout)
        pooled = mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=special)
        vectors[rows] = pooled.cpu().numpy()
    return vectors


def evaluate(bundle: Path, chunk_length: int, genomes: Genomes, device: str) -> dict[str, object]:
    """AUROC, average precision and accuracy over the chunks with a stop-free frame."""
    tokenizer = DnabertTokenizer(bundle / "dnabert_tiny" / "tokenizer.json")
    frames = tokenized_frames(genomes, chunk_length, tokenizer)
    features = torch.from_numpy(frame_features(bundle, frames, device))
    head = load_classifier(bundle / "heads" / f"tiny_{chunk_length}.safetensors")
    scores = head.virus_probabilities(features).numpy()
    record = frames.chunk_record
    calls = call_chunks(scores, frames.chunk, np.zeros(len(scores), np.uint8), len(record))
    known = KnownCalls(
        is_viral=genomes.is_viral[record],
        is_called=calls.is_virus,
        p_virus=calls.p_virus,
        classes=genomes.classes[record],
        class_names=genomes.class_names,
        lengths=genomes.bases.lengths[record],
    )
    metrics = measure(known)
    names = {"auroc": metrics.auroc, "average_precision": metrics.auprc, "accuracy": metrics.accuracy}
    return {
        "chunks": metrics.count,
        "share_with_open_frame": round(metrics.scored / metrics.count, 4),
        **{name: None if value is None else round(value, 4) for name, value in names.items()},
        "called_virus_by_class": {
            own.name: round(own.called_virus / own.scored, 4) for own in metrics.by_class if own.scored
        },
    }
