"""Fits a classifier head to the vectors of finished models.

    python -m scripts.train_bundled.heads --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --bundle virnuc_core/models/bundled --chunk-length 300

The heads that the models are trained under see masked and recoded frames. This one sees real frames as they
are and vectors as a run computes them. With `--dna-alone` it is for chunks without a stop-free frame.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scripts.train_bundled.data import Genomes, TokenizedFrames, tokenized_frames
from scripts.train_bundled.export import dna_features, evaluate, frame_features
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
        relatives: frames for the temperature of a head for stop-free frames: offset in each genome, number, and the shares
            of codons and residues to resample. The models have been trained on all of these genomes and are overconfident
            on them, so the temperature is fitted to synthetic relatives of their frames.
        held_out: share of the groups of a class for early stopping and calibration of a DNA-only head; the models have
            not seen chunks without a stop-free frame, which have no codons to resample.
    """

    draws: tuple[tuple[int, int], ...] = ((137, 20_000), (0, 40_000), (61, 40_000))
    group_power: float = 0.6
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(members=4))
    relatives: tuple[int, int, float, float] = (211, 6_000, 0.85, 0.25)
    held_out: float = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """Inputs of a fit: models, genomes, chunk length in bp, the device for the vectors, and settings."""

    bundle: Path
    train: Genomes
    chunk_length: int
    device: str
    settings: HeadSettings

    def draw(
        self, shift: int, size: int, recoded: tuple[float, float] = (0.0, 0.0), *, closed: bool = False
    ) -> TokenizedFrames:
        """Samples `size` frames (with `closed`, chunks without one), with related ones downweighted."""
        tokenizer = DnabertTokenizer(self.bundle / "dnabert_tiny" / "tokenizer.json")
        frames = tokenized_frames(self.train, self.chunk_length, tokenizer, shift, recoded, closed=closed)
        is_viral, groups = self.train.is_viral[frames.record], self.train.groups[frames.record]
        weights = sample_weights(is_viral, groups, self.settings.group_power)
        rng = np.random.default_rng(shift)
        size = min(size, len(weights))
        return frames.take(np.sort(rng.choice(len(weights), size, replace=False, p=weights)))

    def draw_vectors(self, *, closed: bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Features (n, D) of all draws, and the record (n,) of each."""
        drawn = [self.draw(shift, size, closed=closed) for shift, size in self.settings.draws]
        features_of = dna_features if closed else frame_features
        features = [features_of(self.bundle, frames, self.device) for frames in drawn]
        return np.concatenate(features), np.concatenate([frames.record for frames in drawn])


def fit_for_frames(source: Source) -> MLPClassifier:
    """A head for stop-free frames, not yet calibrated."""
    features, records = source.draw_vectors(closed=False)
    vectors = _equally_weighted(features, source.train.is_viral[records])
    return train_head(vectors, None, source.settings.trainer).classifier


def calibrate(head: MLPClassifier, source: Source) -> float:
    """Applies temperature scaling to a head for stop-free frames, and returns the temperature."""
    shift, size, *recoded = source.settings.relatives
    relatives = source.draw(shift, size, (recoded[0], recoded[1]))
    margins = margins_of(head, torch.from_numpy(frame_features(source.bundle, relatives, source.device)))
    is_viral = source.train.is_viral[relatives.record]
    temperature = fit_temperature(margins, is_viral, np.full(len(is_viral), 1 / len(is_viral)))
    apply_temperature(head, temperature)
    return temperature


def fit_for_dna_alone(source: Source) -> tuple[MLPClassifier, float]:
    """A head for chunks without a stop-free frame, and its temperature."""
    train, settings = source.train, source.settings
    groups = np.unique(train.groups)
    held = np.random.default_rng(0).choice(groups, round(settings.held_out * len(groups)), replace=False)
    features, records = source.draw_vectors(closed=True)
    is_viral, is_held = train.is_viral[records], np.isin(train.groups[records], held)
    parts = [_equally_weighted(features[own], is_viral[own]) for own in (~is_held, is_held)]
    fitted = train_head(parts[0], parts[1], settings.trainer)
    return fitted.classifier, fitted.temperature


def _equally_weighted(features: npt.NDArray[np.float32], is_viral: npt.NDArray[np.bool_]) -> LabelledVectors:
    """Vectors that were sampled by weight."""
    weights = np.full(len(is_viral), 1 / len(is_viral))
    return LabelledVectors(features=features, is_viral=is_viral, weights=weights)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("train", "val", "table", "bundle"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--chunk-length", type=int, required=True)
    parser.add_argument(
        "--dna-alone", action="store_true", help="a head for chunks without a stop-free frame"
    )
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
    name = f"{chunk_length}{'_dna' if arguments.dna_alone else ''}"
    path = bundle / "heads" / f"tiny_{name}.safetensors"
    if arguments.dna_alone:
        head, temperature = fit_for_dna_alone(source)
    else:
        head = load_classifier(path) if arguments.calibrate else fit_for_frames(source)
        temperature = calibrate(head, source)
    save_classifier(head, path)
    write_sums(path.parent, path.parent.glob("*.safetensors"))
    record = bundle / "training.json"
    document = json.loads(record.read_text())
    heads = document.setdefault("heads", {})
    fitted = heads.get(name, {}) if arguments.calibrate else asdict(settings)
    heads[name] = fitted | {"relatives": settings.relatives, "temperature": temperature}
    record.write_text(json.dumps(document, indent=1) + "\n")
    if not arguments.dna_alone:
        val = Genomes.load(arguments.val, arguments.table)
        print(json.dumps(evaluate(bundle, chunk_length, val, device), indent=1))


if __name__ == "__main__":
    main()
