"""Measures a pair of models on frames that it was not trained on."""

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from scripts.train_bundled.batches import FrameSet
from scripts.train_bundled.dataset import Genomes
from scripts.train_bundled.network import TinyPair
from virnuc_core.prediction.verdicts import call_chunks

_BATCH_FRAMES = 1024


@torch.inference_mode()
def frame_scores(model: TinyPair, frames: FrameSet) -> npt.NDArray[np.float32]:
    """Softmax scores (F, 2) of every frame, in order."""
    scores = []
    for begin in range(0, len(frames.labels), _BATCH_FRAMES):
        rows = np.arange(begin, min(begin + _BATCH_FRAMES, len(frames.labels)))
        features, *_ = model.features(*frames.batch(rows, model))
        scores.append(model.logits(features, frames.chunk_length).softmax(-1).cpu())
    return torch.cat(scores).numpy()


def evaluate(model: TinyPair, frames: FrameSet, genomes: Genomes) -> dict[str, object]:
    """AUROC, average precision and accuracy over the chunks with an open frame."""
    scores = frame_scores(model, frames)
    frame_numbers = np.zeros(len(scores), np.uint8)
    verdicts = call_chunks(scores, frames.chunk, frame_numbers, frames.num_chunks)
    records = frames.record[np.unique(frames.chunk, return_index=True)[1]]
    viral, classes = genomes.is_viral[records], genomes.classes[records]
    p_virus, called = (x[verdicts.is_scored] for x in (verdicts.p_virus, verdicts.is_virus))
    return {
        "chunks": frames.num_chunks,
        "share_with_open_frame": float(verdicts.is_scored.mean()),
        "auroc": float(roc_auc_score(viral, p_virus)),
        "average_precision": float(average_precision_score(viral, p_virus)),
        "accuracy": float((called == viral).mean()),
        "called_viral_by_class": {
            name: round(float(called[classes == i].mean()), 4)
            for i, name in enumerate(genomes.class_names)
            if (classes == i).any()
        },
    }


@torch.no_grad()
def recalibrate_heads(
    model: TinyPair, sets: list[FrameSet], batch_frames: int, rng: np.random.Generator
) -> None:
    """Takes the heads' normalisation statistics anew from 200 clean batches of each chunk length."""
    for frames in sets:
        head = model.head(frames.chunk_length)
        head.bn1.reset_running_stats()
        head.bn1.momentum = None
        head.bn1.train()
        for _ in range(200):
            features, *_ = model.features(*frames.batch(frames.draw(batch_frames, rng), model))
            model.logits(features, frames.chunk_length)
        head.bn1.eval()
