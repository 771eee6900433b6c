"""Fits a classifier head to the vectors of finished models.

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
import torch

from scripts.train_bundled.data import Genomes, TokenizedFrames, tokenized_frames
from scripts.train_bundled.export import evaluate, frame_features
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.models.classifier import MLPClassifier, load_classifier, save_classifier
from virnuc_core.models.hub import write_sums
from virnuc_core.training.split import sample_weights
from virnuc_core.training.trainer import (
    LabelledVectors,
    TrainerSettings,
    apply_temperature,
    fit_temperature,
    margins_of,
    train_head,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Everything that decides a head, apart from the vectors.

    Attributes:
        draws: offset of the chunks in each genome, in bp, and the number of their frames to sample.
        group_power: see `sample_weights`.
        trainer: hyperparameters.
        relatives: frames for the temperature: offset in each genome, number, and the shares of codons and residues to
            resample. The models have been trained on all of these genomes and are overconfident on them, so the
            temperature is fitted to synthetic relatives of their frames.
    """

    draws: tuple[tuple[int, int], ...] = ((137, 20_000), (0, 40_000), (61, 40_000))
    group_power: float = 0.6
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(members=4))
    relatives: tuple[int, int, float, float] = (211, 6_000, 0.85, 0.25)


@dataclass(frozen=True, slots=True)
class Source:
    """Inputs of a fit: models, genomes, chunk length in bp, the device for the vectors, and settings."""

    bundle: Path
    train: Genomes
    chunk_length: int
    device: str
    settings: HeadSettings

    def draw(self, shift: int, size: int, recoded: tuple[float, float] = (0.0, 0.0)) -> TokenizedFrames:
        """Samples `size` frames, with related ones downweighted."""
        tokenizer = DnabertTokenizer(self.bundle / "dnabert_tiny" / "tokenizer.json")
        frames = tokenized_frames(self.train, self.chunk_length, tokenizer, shift, recoded)
        is_viral, groups = self.train.is_viral[frames.record], self.train.groups[frames.record]
        weights = sample_weights(is_viral, groups, self.settings.group_power)
        rng = np.random.default_rng(shift)
        size = min(size, len(weights))
        return frames.take(np.sort(rng.choice(len(weights), size, replace=False, p=weights)))


def fit(source: Source) -> MLPClassifier:
    """A head that is not yet calibrated."""
    drawn = [source.draw(shift, size) for shift, size in source.settings.draws]
    features = np.concatenate([frame_features(source.bundle, frames, source.device) for frames in drawn])
    is_viral = source.train.is_viral[np.concatenate([frames.record for frames in drawn])]
    weights = np.full(len(is_viral), 1 / len(is_viral))  # the frames were sampled by weight
    vectors = LabelledVectors(features=features, is_viral=is_viral, weights=weights)
    return train_head(vectors, None, source.settings.trainer).classifier


def calibrate(head: MLPClassifier, source: Source) -> float:
    """Applies temperature scaling to a head, and returns the temperature."""
    shift, size, *recoded = source.settings.relatives
    relatives = source.draw(shift, size, (recoded[0], recoded[1]))
    margins = margins_of(head, torch.from_numpy(frame_features(source.bundle, relatives, source.device)))
    is_viral = source.train.is_viral[relatives.record]
    temperature = fit_temperature(margins, is_viral, np.full(len(is_viral), 1 / len(is_viral)))
    apply_temperature(head, temperature)
    return temperature


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("train", "val", "table", "bundle"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--chunk-length", type=int, required=True)
    parser.add_argument("--calibrate", action="store_true", help="only calibrate the existing head")
    parser.add_argument(
        "--draws", nargs="+", metavar="SHIFT:FRAMES", help="other draws than those of HeadSettings"
    )
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    bundle, chunk_length, device = arguments.bundle, arguments.chunk_length, arguments.device
    settings = HeadSettings()
    if arguments.draws:
        pairs = [draw.split(":") for draw in arguments.draws]
        settings = replace(settings, draws=tuple((int(shift), int(frames)) for shift, frames in pairs))
    train = Genomes.load(arguments.train, arguments.table)
    source = Source(bundle, train, chunk_length, device, settings)
    path = bundle / "heads" / f"tiny_{chunk_length}.safetensors"
    head = load_classifier(path) if arguments.calibrate else fit(source)
    temperature = calibrate(head, source)
    save_classifier(head, path)
    write_sums(path.parent, path.parent.glob("*.safetensors"))
    record = bundle / "training.json"
    document = json.loads(record.read_text())
    heads = document.setdefault("heads", {})
    fitted = heads.get(str(chunk_length), {}) if arguments.calibrate else asdict(settings)
    heads[str(chunk_length)] = fitted | {"relatives": settings.relatives, "temperature": temperature}
    record.write_text(json.dumps(document, indent=1) + "\n")
    val = Genomes.load(arguments.val, arguments.table)
    print(json.dumps(evaluate(bundle, chunk_length, val, device), indent=1))


if __name__ == "__main__":
    main()
