"""Fits a classifier head anew to the vectors of finished models.

    python -m scripts.train_bundled.heads --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --bundle virnuc_core/models/bundled --chunk-length 300

The heads that the models are trained under see masked and recoded frames. This one sees real frames as they
are and vectors as a run computes them.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from scripts.train_bundled import dataset
from scripts.train_bundled.batches import sample_weights
from scripts.train_bundled.evaluate import evaluate, frame_features
from scripts.train_bundled.export import save_head
from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.models.classifier import MLPClassifier


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Everything that decides a head, apart from the vectors."""

    draws: tuple[tuple[int, int], ...] = ((137, 20_000), (0, 40_000), (61, 40_000))
    group_power: float = 0.6
    members: int = 2
    epochs: int = 10
    batch_frames: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.5


def fit_head(
    features: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_], settings: HeadSettings
) -> MLPClassifier:
    """Trains a head on features (n, D) and labels (n,), True for virus."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    inputs = torch.from_numpy((features - mean) / scale)
    targets = torch.from_numpy(labels.astype(np.int64))
    members = [_fit_member(inputs, targets, settings, seed) for seed in range(settings.members)]
    head = _side_by_side(members)
    _fold_in(head, torch.from_numpy(mean), torch.from_numpy(scale))
    return head.eval()


def _fit_member(
    inputs: torch.Tensor, targets: torch.Tensor, settings: HeadSettings, seed: int
) -> MLPClassifier:
    torch.manual_seed(seed)
    head = MLPClassifier(inputs.shape[1])
    optimizer = torch.optim.AdamW(
        head.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    num_steps = settings.epochs * -(-len(inputs) // settings.batch_frames)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=num_steps)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(inputs)).split(settings.batch_frames):
            loss = F.cross_entropy(head(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return head


@torch.no_grad()
def _side_by_side(members: list[MLPClassifier]) -> MLPClassifier:
    """One head that gives the mean of the members' logits: their hidden units next to each other."""
    merged = MLPClassifier(members[0].in_features, sum(m.hidden_layer.out_features for m in members))
    states = [member.state_dict() for member in members]
    state = {name: torch.cat([s[name] for s in states]) for name in states[0] if states[0][name].ndim}
    state["output_layer.weight"] = torch.cat([s["output_layer.weight"] for s in states], 1) / len(members)
    state["output_layer.bias"] = torch.stack([s["output_layer.bias"] for s in states]).mean(0)
    merged.load_state_dict(state, strict=False)
    return merged


@torch.no_grad()
def _fold_in(head: MLPClassifier, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Moves the standardisation of the features into the first layer."""
    layer = head.hidden_layer
    layer.weight.div_(scale)
    layer.bias.sub_(layer.weight @ mean)


def drawn_features(
    bundle: Path, train: dataset.Genomes, chunk_length: int, settings: HeadSettings, device: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Features (n, D) and labels (n,) of the drawn frames."""
    tokenizer = DnabertTokenizer(bundle / "dnabert_tiny" / "tokenizer.json")
    features, labels = [], []
    for shift, size in settings.draws:
        frames = dataset.tokenized_frames(train, chunk_length, tokenizer, shift)
        weights = sample_weights(train, frames.record, settings.group_power)
        rng = np.random.default_rng(shift)
        drawn = frames.take(np.sort(rng.choice(len(weights), size, replace=False, p=weights)))
        features.append(frame_features(bundle, drawn, device))
        labels.append(train.is_viral[drawn.record])
    return np.concatenate(features), np.concatenate(labels)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("train", "val", "table", "bundle"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--chunk-length", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    bundle, chunk_length, settings = arguments.bundle, arguments.chunk_length, HeadSettings()
    train = dataset.load_genomes(arguments.train, arguments.table)
    features, labels = drawn_features(bundle, train, chunk_length, settings, arguments.device)
    path = bundle / "heads" / f"tiny_{chunk_length}.safetensors"
    save_head(fit_head(features, labels, settings), path)
    record = bundle / "training.json"
    document = json.loads(record.read_text())
    document["head_settings"] = document.get("head_settings", {}) | {str(chunk_length): asdict(settings)}
    val = dataset.load_genomes(arguments.val, arguments.table)
    record.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(evaluate(bundle, chunk_length, val, arguments.device), indent=1))


if __name__ == "__main__":
    main()
