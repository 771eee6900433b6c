"""Trains the bundled models and writes them in the layout that virnuc_core loads.

    python -m scripts.train_bundled.train --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --out virnuc_core/models/bundled

Masked tokens of both models, the taxonomic class and the two-way label of each stop-free frame are learnt together;
an exponential average of the weights is kept. `--val` is measured and never trained on; the default settings were
chosen with the help of its figures. `--holdout 0.1` trains without a tenth of the related groups and measures those
as well.
"""

import argparse
import copy
import itertools
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.train_bundled import dataset
from scripts.train_bundled.batches import FrameSet
from scripts.train_bundled.evaluate import evaluate
from scripts.train_bundled.export import export
from scripts.train_bundled.network import (
    DNABERT_MASK_ID,
    DNABERT_SPEC,
    TinyPair,
    mask_tokens,
    masked_token_losses,
)
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer

UNSEEN_CLASS = "invertebrate"
AMINO_ACID_IDS = (4, 24)
BPE_IDS = (len(dataset.SPECIAL_TOKENS), DNABERT_SPEC.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that decides the result, apart from the data."""

    steps: int = 9000
    seed: int = 1
    chunk_lengths: tuple[int, ...] = (500, 300)
    schedule: tuple[int, ...] = (0, 1, 1)
    shifts: int = 8
    recoded: float = 0.85
    substituted: float = 0.0
    batch_frames: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    label_smoothing: float = 0.1
    mlm_weight: float = 0.6
    class_weight: float = 0.3
    group_power: float = 0.7
    ema_decay: float = 0.999
    warmup: float = 0.05
    label_warmup: float = 0.15


def loss_of(
    model: TinyPair, frames: FrameSet, rows: npt.NDArray[np.int64], progress: float, settings: Settings
) -> Tensor:
    """Weighted sum of the label, class and masked-token losses of one batch."""
    clean = frames.batch(rows, model)
    on_device = torch.from_numpy(rows).to(frames.labels.device)
    protein, hidden_residues = mask_tokens(clean[0], Esm2Tokenizer.mask_id, AMINO_ACID_IDS)
    dna, hidden_pieces = mask_tokens(clean[1], DNABERT_MASK_ID, BPE_IDS)
    features, *states = model.features(protein, dna)
    logits = model.logits(features, frames.chunk_length).float()
    label = F.cross_entropy(logits, frames.labels[on_device], label_smoothing=settings.label_smoothing)
    taxon = F.cross_entropy(model.class_head(features).float(), frames.classes[on_device])
    masked = masked_token_losses(model, clean, (states[0], states[1]), (hidden_residues, hidden_pieces))
    supervised = min(1.0, progress / settings.label_warmup)
    return supervised * (label + settings.class_weight * taxon) + settings.mlm_weight * masked


def fit(model: TinyPair, sets: list[FrameSet], settings: Settings, rng: np.random.Generator) -> TinyPair:
    """Trains for `settings.steps` batches and returns the averaged model."""
    average = copy.deepcopy(model).requires_grad_(False)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
    )
    model.train()
    turns = itertools.cycle([sets[i] for i in settings.schedule])
    for step, frames in zip(range(settings.steps), turns, strict=False):
        progress = step / settings.steps
        rate = min(1.0, progress / settings.warmup) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(rate, 0.01)
        rows = frames.draw(settings.batch_frames, rng)
        with torch.autocast(frames.labels.device.type, torch.bfloat16):
            loss = loss_of(model, frames, rows, progress, settings)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(settings.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if step % 500 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return average.eval()


def split_groups(genomes: dataset.Genomes, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out rows: `share` of the groups, and one whole class."""
    groups = np.unique(genomes.groups)
    held = np.random.default_rng(seed).choice(groups, round(share * len(groups)), replace=False)
    out = np.isin(genomes.groups, held)
    if share:
        out |= genomes.classes == genomes.class_names.index(UNSEEN_CLASS)
    return np.flatnonzero(~out), np.flatnonzero(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("train", "val", "table", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--holdout", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    for name, value in asdict(Settings()).items():
        if not isinstance(value, tuple):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    settings = Settings(**{k: arguments[k] for k in asdict(Settings()) if k in arguments})
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)

    out: Path = arguments["out"]
    (out / "dnabert_tiny").mkdir(parents=True, exist_ok=True)
    genomes = dataset.load_genomes(arguments["train"], arguments["table"])
    val = dataset.load_genomes(arguments["val"], arguments["table"])
    kept, held = split_groups(genomes, arguments["holdout"], seed=0)
    train = genomes.take(kept)
    vocabulary = out / "dnabert_tiny" / "tokenizer.json"
    dataset.train_vocabulary(train, DNABERT_SPEC.vocab_size, vocabulary, rng)
    tokenizer = DnabertTokenizer(vocabulary)

    def frame_set(
        source: dataset.Genomes, chunk_length: int, shifts: list[int], recoded: list[tuple[float, float]]
    ) -> FrameSet:
        tokenize = partial(dataset.tokenized_frames, source, chunk_length, tokenizer)
        with ProcessPoolExecutor(max_workers=len(shifts), mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(tokenize, shifts, recoded))
        return FrameSet.build(source, parts, settings.group_power, torch.device(arguments["device"]))

    sets = []
    for chunk_length in settings.chunk_lengths:
        shifts = [0, *rng.integers(1, chunk_length, settings.shifts - 1).tolist()]
        anew = (settings.recoded, settings.substituted)
        recoded = [anew if i % 4 else (0.0, 0.0) for i in range(settings.shifts)]
        sets.append(frame_set(train, chunk_length, shifts, recoded))
        print(f"{chunk_length} bp: {len(sets[-1].labels)} frames to train on", flush=True)
    measured = {"val": val} | ({"holdout": genomes.take(held)} if len(held) else {})

    model = TinyPair(settings.chunk_lengths, len(genomes.class_names), settings.dropout)
    model = model.to(arguments["device"])
    average = fit(model, sets, settings, rng)
    export(average, out)
    results = {
        name: {str(k): evaluate(out, k, source, arguments["device"]) for k in settings.chunk_lengths}
        for name, source in measured.items()
    }
    report = {"settings": asdict(settings), "holdout": arguments["holdout"], "measured": results}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
