"""Trains the bundled models and writes them in the layout that virnuc_core loads.

    python -m scripts.train_bundled.train --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --out virnuc_core/models/bundled

Masked tokens of both models, the taxonomic class and the two-way label of each stop-free frame are learnt together;
an exponential average of the weights is kept. `--val` is measured and never trained on; the default settings were
chosen with the help of its metrics. `--holdout 0.1` trains without a tenth of the related groups and measures those
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

from scripts.train_bundled.data import SPECIAL_TOKENS, FrameSet, Genomes, tokenized_frames, train_vocabulary
from scripts.train_bundled.export import evaluate, export
from scripts.train_bundled.network import DNABERT_SPEC, TinyPair, Tokens
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer

UNSEEN_CLASS = "invertebrate"
AMINO_ACID_IDS = (4, 24)
BPE_MASK_ID = SPECIAL_TOKENS.index("[MASK]")
BPE_IDS = (len(SPECIAL_TOKENS), DNABERT_SPEC.vocab_size)


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
    clean = (
        Tokens.take(frames.protein, rows, model.esm2),
        Tokens.take(frames.dna, rows, model.dnabert),
    )
    on_device = torch.from_numpy(rows).to(frames.labels.device)
    protein, masked_residues = clean[0].masked(Esm2Tokenizer.mask_id, AMINO_ACID_IDS)
    dna, masked_pieces = clean[1].masked(BPE_MASK_ID, BPE_IDS)
    features, *states = model.features(protein, dna)
    logits = model.head(frames.chunk_length)(features).float()
    label = F.cross_entropy(logits, frames.labels[on_device], label_smoothing=settings.label_smoothing)
    taxon = F.cross_entropy(model.class_head(features).float(), frames.classes[on_device])
    masked = model.masked_token_loss(clean, (states[0], states[1]), (masked_residues, masked_pieces))
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


def split_groups(genomes: Genomes, share: float) -> tuple[Genomes, Genomes | None]:
    """Training and held-out genomes: `share` of the groups, and one whole class."""
    if not share:
        return genomes, None
    groups = np.unique(genomes.groups)
    held = np.random.default_rng(0).choice(groups, round(share * len(groups)), replace=False)
    is_held = np.isin(genomes.groups, held) | (genomes.classes == genomes.class_names.index(UNSEEN_CLASS))
    return genomes.take(np.flatnonzero(~is_held)), genomes.take(np.flatnonzero(is_held))


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

    out, device = arguments["out"], arguments["device"]
    (out / "dnabert_tiny").mkdir(parents=True, exist_ok=True)
    val = Genomes.load(arguments["val"], arguments["table"])
    train, held = split_groups(Genomes.load(arguments["train"], arguments["table"]), arguments["holdout"])
    vocabulary = out / "dnabert_tiny" / "tokenizer.json"
    train_vocabulary(train, DNABERT_SPEC.vocab_size, vocabulary, rng)
    # Every fourth shift is of the real frames.
    recoded = [
        (settings.recoded, settings.substituted) if i % 4 else (0.0, 0.0) for i in range(settings.shifts)
    ]
    sets = []
    for chunk_length in settings.chunk_lengths:
        shifts = [0, *rng.integers(1, chunk_length, settings.shifts - 1).tolist()]
        tokenize = partial(tokenized_frames, train, chunk_length, DnabertTokenizer(vocabulary))
        with ProcessPoolExecutor(max_workers=len(shifts), mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(tokenize, shifts, recoded))
        sets.append(FrameSet.build(train, chunk_length, parts, settings.group_power, torch.device(device)))
        print(f"{chunk_length} bp: {len(sets[-1].labels)} frames to train on", flush=True)

    model = TinyPair(settings.chunk_lengths, len(train.class_names), settings.dropout).to(device)
    export(fit(model, sets, settings, rng), out)
    measured = {"val": val} if held is None else {"val": val, "holdout": held}
    results = {
        name: {str(k): evaluate(out, k, genomes, device) for k in settings.chunk_lengths}
        for name, genomes in measured.items()
    }
    report = {"settings": asdict(settings), "holdout": arguments["holdout"], "measured": results}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
