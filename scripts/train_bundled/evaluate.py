"""Evaluates a bundle on held-out frames, with the code of a run."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from scripts.train_bundled.dataset import Genomes, TokenizedFrames, tokenized_frames
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, TokenColumn
from virnuc_core.inference.device import default_token_budget
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.encoder import mean_pool
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.results.calls import call_chunks
from virnuc_core.specs import Family


def frame_features(bundle: Path, frames: TokenizedFrames, device: str) -> npt.NDArray[np.float32]:
    """Classifier features fp32 (F, D_dna + D_protein) of every frame."""
    dna = dna_features(bundle, frames, device)
    protein = _vectors(bundle / "esm2_tiny", "esm2", frames.protein, device)
    return np.concatenate([dna, protein], axis=1)


def dna_features(bundle: Path, frames: TokenizedFrames, device: str) -> npt.NDArray[np.float32]:
    """Features of the DNA model only, fp32 (F, D_dna)."""
    return _vectors(bundle / "dnabert_tiny", "dnabert_s", frames.dna, device)


@torch.inference_mode()
def _vectors(folder: Path, family: Family, tokens: TokenColumn, device: str) -> npt.NDArray[np.float32]:
    model = load_model(open_checkpoint(str(folder), family), device, "fp32")
    spec = model.spec
    vectors = np.empty((len(tokens), spec.embedding_dim), np.float32)
    for rows in pack(tokens.num_tokens, default_token_budget(spec, "fp32", device)).batches:
        batch = tokens.take(rows)
        layout = model.build_layout(batch.cu_seqlens, "sdpa")
        hidden_states = model(torch.from_numpy(batch.input_ids).to(device), layout)
        pooled = mean_pool(
            hidden_states, layout.cu_seqlens, include_special_tokens=model.pools_special_tokens
        )
        vectors[rows] = pooled.cpu().numpy()
    return vectors


def evaluate(bundle: Path, chunk_length: int, genomes: Genomes, device: str) -> dict[str, object]:
    """AUROC, average precision and accuracy over the chunks with a stop-free frame."""
    tokenizer = DnabertTokenizer(bundle / "dnabert_tiny" / "tokenizer.json")
    frames = tokenized_frames(genomes, chunk_length, tokenizer)
    features = torch.from_numpy(frame_features(bundle, frames, device))
    head = load_classifier(bundle / "heads" / f"tiny_{chunk_length}.safetensors")
    scores = head.virus_probabilities(features).numpy()
    frame_numbers = np.zeros(len(scores), np.uint8)
    calls = call_chunks(scores, frames.chunk, frame_numbers, frames.num_chunks)
    records = frames.record[np.unique(frames.chunk, return_index=True)[1]]
    viral, classes = genomes.is_viral[records], genomes.classes[records]
    p_virus, called = (x[calls.is_scored] for x in (calls.p_virus, calls.is_virus))
    return {
        "chunks": frames.num_chunks,
        "share_with_open_frame": round(float(calls.is_scored.mean()), 4),
        "auroc": round(float(roc_auc_score(viral, p_virus)), 4),
        "average_precision": round(float(average_precision_score(viral, p_virus)), 4),
        "accuracy": round(float((called == viral).mean()), 4),
        "called_virus_by_class": {
            name: round(float(called[classes == i].mean()), 4)
            for i, name in enumerate(genomes.class_names)
            if (classes == i).any()
        },
    }
