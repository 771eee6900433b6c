"""Fits a classifier head anew to the vectors of finished models.

    python -m scripts.train_bundled.heads --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --bundle virnuc_core/models/bundled --chunk-length 300

The heads that the models are trained under see masked and recoded frames. This one sees real frames as they
are and vectors as a run computes them.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.train_bundled import dataset
from scripts.train_bundled.evaluate import evaluate, frame_features
from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.models.checksums import write_sums
from virnuc_core.models.classifier import save_classifier
from virnuc_core.training.sampling import sample_weights
from virnuc_core.training.trainer import LabelledVectors, TrainerSettings, train_head


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Everything that decides a head, apart from the vectors.

    Attributes:
        draws: how far into each genome its chunks begin, in bp, and how many of their frames are drawn.
        group_power: see `sample_weights`.
        trainer: the fit. Nothing is held out of it, since the models have seen all of these genomes.
    """

    draws: tuple[tuple[int, int], ...] = ((137, 20_000), (0, 40_000), (61, 40_000))
    group_power: float = 0.6
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


def drawn_features(
    bundle: Path, train: dataset.Genomes, chunk_length: int, settings: HeadSettings, device: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Features (n, D) and labels (n,) of the drawn frames."""
    tokenizer = DnabertTokenizer(bundle / "dnabert_tiny" / "tokenizer.json")
    features, labels = [], []
    for shift, size in settings.draws:
        frames = dataset.tokenized_frames(train, chunk_length, tokenizer, shift)
        weights = sample_weights(
            train.is_viral[frames.record], train.groups[frames.record], settings.group_power
        )
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
    parser.add_argument(
        "--draws", nargs="+", metavar="SHIFT:FRAMES", help="other draws than those of HeadSettings"
    )
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    bundle, chunk_length, settings = arguments.bundle, arguments.chunk_length, HeadSettings()
    if arguments.draws:
        pairs = [draw.split(":") for draw in arguments.draws]
        settings = replace(settings, draws=tuple((int(shift), int(frames)) for shift, frames in pairs))
    train = dataset.load_genomes(arguments.train, arguments.table)
    features, labels = drawn_features(bundle, train, chunk_length, settings, arguments.device)
    path = bundle / "heads" / f"tiny_{chunk_length}.safetensors"
    # Drawn by their weights already.
    drawn = LabelledVectors(features=features, is_viral=labels, weights=np.full(len(labels), 1 / len(labels)))
    save_classifier(train_head(drawn, None, settings.trainer).classifier, path)
    write_sums(path.parent, path.parent.glob("*.safetensors"))
    record = bundle / "training.json"
    document = json.loads(record.read_text())
    document["head_settings"] = document.get("head_settings", {}) | {str(chunk_length): asdict(settings)}
    val = dataset.load_genomes(arguments.val, arguments.table)
    record.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(evaluate(bundle, chunk_length, val, arguments.device), indent=1))


if __name__ == "__main__":
    main()
