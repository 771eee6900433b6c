"""Fits a classifier head to the vectors of finished models.

    python -m scripts.train_bundled.heads --train train.fa.gz --val val.fa.gz --table genomes.tsv \
        --bundle virnuc_core/models/bundled --chunk-length 300

The heads that the models are trained under see masked and recoded frames. This one sees real frames as they
are and vectors as a run computes them. With `--dna-alone` it is for chunks without a stop-free frame.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scripts.train_bundled import dataset
from scripts.train_bundled.evaluate import dna_features, evaluate, frame_features
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
    """Inputs of a fit: models, genomes, chunk length in bp, and the device for the vectors."""

    bundle: Path
    train: dataset.Genomes
    chunk_length: int
    device: str

    @property
    def tokenizer(self) -> DnabertTokenizer:
        """Of the DNA model."""
        return DnabertTokenizer(self.bundle / "dnabert_tiny" / "tokenizer.json")

    def draw(
        self, frames: dataset.TokenizedFrames, size: int, group_power: float, seed: int
    ) -> dataset.TokenizedFrames:
        """Samples `size` frames, with related ones downweighted."""
        is_viral, groups = self.train.is_viral[frames.record], self.train.groups[frames.record]
        weights = sample_weights(is_viral, groups, group_power)
        rng = np.random.default_rng(seed)
        size = min(size, len(weights))
        return frames.take(np.sort(rng.choice(len(weights), size, replace=False, p=weights)))


def drawn_vectors(
    source: Source,
    settings: HeadSettings,
    tokenized: Callable[..., dataset.TokenizedFrames],
    features_of: Callable[[Path, dataset.TokenizedFrames, str], npt.NDArray[np.float32]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Features (n, D) of all samples, and the record (n,) of each."""
    features, records = [], []
    for shift, size in settings.draws:
        frames = tokenized(source.train, source.chunk_length, source.tokenizer, shift)
        drawn = source.draw(frames, size, settings.group_power, shift)
        features.append(features_of(source.bundle, drawn, source.device))
        records.append(drawn.record)
    return np.concatenate(features), np.concatenate(records)


def fit_for_frames(source: Source, settings: HeadSettings) -> MLPClassifier:
    """A head for stop-free frames, not yet calibrated."""
    features, records = drawn_vectors(source, settings, dataset.tokenized_frames, frame_features)
    vectors = _drawn_by_weight(features, source.train.is_viral[records])
    return train_head(vectors, None, settings.trainer).classifier


def calibrate(head: MLPClassifier, source: Source, settings: HeadSettings) -> float:
    """Applies temperature scaling to a head for stop-free frames, and returns the temperature."""
    shift, size, recoded, substituted = settings.relatives
    frames = dataset.tokenized_frames(
        source.train, source.chunk_length, source.tokenizer, shift, (recoded, substituted)
    )
    relatives = source.draw(frames, size, settings.group_power, shift)
    margins = margins_of(head, torch.from_numpy(frame_features(source.bundle, relatives, source.device)))
    is_viral = source.train.is_viral[relatives.record]
    temperature = fit_temperature(margins, is_viral, np.full(len(is_viral), 1 / len(is_viral)))
    apply_temperature(head, temperature)
    return temperature


def fit_for_dna_alone(source: Source, settings: HeadSettings) -> tuple[MLPClassifier, float]:
    """A head for chunks without a stop-free frame, and its temperature."""
    groups = np.unique(source.train.groups)
    held = np.random.default_rng(0).choice(groups, round(settings.held_out * len(groups)), replace=False)
    features, records = drawn_vectors(source, settings, dataset.tokenized_closed_chunks, dna_features)
    is_viral, is_held = source.train.is_viral[records], np.isin(source.train.groups[records], held)
    train, validation = (_drawn_by_weight(features[own], is_viral[own]) for own in (~is_held, is_held))
    fitted = train_head(train, validation, settings.trainer)
    return fitted.classifier, fitted.temperature


def _drawn_by_weight(features: npt.NDArray[np.float32], is_viral: npt.NDArray[np.bool_]) -> LabelledVectors:
    """Vectors already sampled by weight."""
    return LabelledVectors(
        features=features, is_viral=is_viral, weights=np.full(len(is_viral), 1 / len(is_viral))
    )


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
    parser.add_argument("--calibrate", action="store_true", help="only calibrate the head that is there")
    parser.add_argument(
        "--draws", nargs="+", metavar="SHIFT:FRAMES", help="other draws than those of HeadSettings"
    )
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    settings = HeadSettings()
    if arguments.draws:
        pairs = [draw.split(":") for draw in arguments.draws]
        settings = replace(settings, draws=tuple((int(shift), int(frames)) for shift, frames in pairs))
    train = dataset.load_genomes(arguments.train, arguments.table)
    source = Source(arguments.bundle, train, arguments.chunk_length, arguments.device)
    name = f"{arguments.chunk_length}{'_dna' if arguments.dna_alone else ''}"
    path = arguments.bundle / "heads" / f"tiny_{name}.safetensors"
    if arguments.dna_alone:
        head, temperature = fit_for_dna_alone(source, settings)
    else:
        head = load_classifier(path) if arguments.calibrate else fit_for_frames(source, settings)
        temperature = calibrate(head, source, settings)
    save_classifier(head, path)
    write_sums(path.parent, path.parent.glob("*.safetensors"))
    record = arguments.bundle / "training.json"
    document = json.loads(record.read_text())
    heads = document.setdefault("heads", {})
    heads[name] = (heads.get(name, {}) if arguments.calibrate else asdict(settings)) | {
        "relatives": settings.relatives,
        "temperature": temperature,
    }
    record.write_text(json.dumps(document, indent=1) + "\n")
    if not arguments.dna_alone:
        val = dataset.load_genomes(arguments.val, arguments.table)
        print(json.dumps(evaluate(arguments.bundle, arguments.chunk_length, val, arguments.device), indent=1))


if __name__ == "__main__":
    main()
