"""k-mers: a classifier by 6-mer frequencies as the baseline of the scoreboard, and what sequences share with others.

    python -m benchmarks.kmers train --data FOLDER --model MODEL.npz
    python -m benchmarks.kmers predict --model MODEL.npz --fasta IN.fa --out OUT.tsv

The classifier is a logistic regression over the frequencies of the 2,080 canonical 6-mers (those of both strands count as
one), one for each length, on random pieces of that length. Pieces are drawn as for the bundled models: half of them viral,
the others by fixed shares of their classes, families by their size to the power of 0.6. A sequence is scored by the
regression of the greatest length that is not above its own, else by that of the shortest.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import dnaio
import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression

from scripts.train_bundled.genomes import Genomes
from virnuc_core.columns import ByteColumn, Float32, Float64, Int64, concatenated_ranges
from virnuc_core.training.split import UInt64, sampled_kmers

LENGTHS: Final = (300, 500, 1_000, 3_000, 5_000, 10_000)  # bp
TRAINING_FILES: Final = ("train.fa.gz", "extra.fa.gz")
K: Final = 6
NUM_PIECES: Final = 30_000  # for each length
INVERSE_PENALTY: Final = 0.03  # C of the regression, over standardized frequencies
GROUP_POWER: Final = 0.6
SEED: Final = 0
_BLOCK_BASES: Final = 1 << 21
_DIGITS: Final = np.full(256, 4, np.uint8)
_DIGITS[list(b"ACGTacgt")] = [0, 1, 2, 3] * 2


def canonical_6mers(sequences: ByteColumn) -> tuple[Int64, Int64]:
    """The 6-mers of n sequences, of each the lesser of itself and its reverse complement.

    Returns:
        Codes int64 (m,), 2 bits a base, and the sequence of each, int64 (m,). 6-mers with other letters than A, C, G and T are
        left out.
    """
    digits = _DIGITS[sequences.data[sequences.offsets[0] : sequences.offsets[-1]]].astype(np.int64)
    lengths = sequences.lengths
    count = max(0, len(digits) - K + 1)
    row = np.repeat(np.arange(len(lengths)), lengths)[:count]
    is_clean = np.arange(count) + K <= np.cumsum(lengths)[row]
    forward, reverse = np.zeros((2, count), np.int64)
    for place in range(K):
        digit = digits[place : place + count]
        is_clean &= digit < 4
        forward = (forward << 2) | digit
        reverse |= (3 - digit) << (2 * place)
    return np.minimum(forward, reverse)[is_clean], row[is_clean]


def blocks(sequences: ByteColumn) -> Iterator[ByteColumn]:
    """Consecutive sequences of about 2 Mbases together, or a single longer one."""
    block = (sequences.offsets[:-1] - sequences.offsets[0]) // _BLOCK_BASES
    bounds = [*np.flatnonzero(np.diff(block, prepend=-1)).tolist(), len(sequences)]
    for begin, end in itertools.pairwise(bounds):
        yield sequences.rows(begin, end)


def _canonical_numbers() -> Int64:
    """int64 (4096,): the number of each 6-mer among the canonical ones."""
    every = ByteColumn.from_strings("".join(letters) for letters in itertools.product("ACGT", repeat=K))
    numbers: Int64 = np.unique(canonical_6mers(every)[0], return_inverse=True)[1]
    return numbers


_NUMBERS: Final = _canonical_numbers()
NUM_KMERS: Final = int(_NUMBERS.max()) + 1


def frequencies(sequences: ByteColumn) -> Float32:
    """Frequencies of the canonical 6-mers, float32 (n, 2080); zeros where there is none."""
    codes, row = canonical_6mers(sequences)
    counts = np.bincount(row * NUM_KMERS + _NUMBERS[codes], minlength=len(sequences) * NUM_KMERS)
    counts = counts.reshape(len(sequences), NUM_KMERS)
    found: Float32 = (counts / np.maximum(1, counts.sum(1, keepdims=True))).astype(np.float32)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class KmerModel:
    """L logistic regressions, each for pieces of one length.

    Attributes:
        lengths: int64 (L,) bp, ascending.
        weights: float32 (L, 2080) of the frequencies.
        bias: float32 (L,).
    """

    lengths: Int64
    weights: Float32
    bias: Float32

    @classmethod
    def train(cls, genomes: Genomes, lengths: Sequence[int], num_pieces: int) -> Self:
        rng = np.random.default_rng(SEED)
        weights, bias = [], []
        for length in lengths:
            inputs, is_viral = _draw(genomes, length, num_pieces, rng)
            mean, scale = inputs.mean(0), inputs.std(0) + 1e-9
            inputs -= mean
            inputs /= scale
            fitted = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000).fit(inputs, is_viral)
            weights.append(fitted.coef_[0] / scale)
            bias.append(fitted.intercept_[0] - weights[-1] @ mean)
        return cls(
            lengths=np.array(lengths), weights=np.array(weights, np.float32), bias=np.array(bias, np.float32)
        )

    def p_virus(self, sequences: ByteColumn) -> Float64:
        """float64 (n,); NaN without any 6-mer."""
        scores = []
        for block in blocks(sequences):
            inputs = frequencies(block)
            own = np.maximum(0, np.searchsorted(self.lengths, block.lengths, side="right") - 1)
            margins = (inputs * self.weights[own]).sum(1) + self.bias[own]
            scores.append(np.where(inputs.any(1), 1 / (1 + np.exp(-margins.astype(float))), np.nan))
        return np.concatenate(scores)


def _draw(
    genomes: Genomes, length: int, count: int, rng: np.random.Generator
) -> tuple[Float32, npt.NDArray[np.bool_]]:
    """Frequencies of random pieces of this length, and bool (count,) which are viral: about half of them."""
    weights = np.where(genomes.bases.lengths >= length, genomes.weights(GROUP_POWER), 0)
    for own in (genomes.is_viral, ~genomes.is_viral):
        weights[own] *= 0.5 / weights[own].sum()
    record = rng.choice(len(weights), count, p=weights)
    starts = genomes.bases.offsets[record] + rng.integers(
        0, genomes.bases.lengths[record] - length, endpoint=True
    )
    inputs = np.empty((count, NUM_KMERS), np.float32)
    step = max(1, _BLOCK_BASES // length)
    for begin in range(0, count, step):
        own_starts = starts[begin : begin + step]
        index, offsets = concatenated_ranges(own_starts, np.full(len(own_starts), length))
        inputs[begin : begin + step] = frequencies(ByteColumn(genomes.bases.data[index], offsets))
    return inputs, genomes.is_viral[record]


def shares_found(sequences: ByteColumn, known: ByteColumn) -> Float64:
    """Share of the distinct 21-mers of each sequence that are found in the known ones, on either strand: float64 (n,)."""
    own = list(map(_all_21mers, sequences.to_strings()))
    found = np.unique(np.concatenate(own))
    is_found = np.zeros(len(found), np.bool_)
    for block in blocks(known):
        is_found |= np.isin(found, np.concatenate(list(map(_all_21mers, block.to_strings()))))
    return np.array([is_found[np.searchsorted(found, kmers)].mean() if len(kmers) else 0.0 for kmers in own])


def _all_21mers(sequence: str) -> UInt64:
    return sampled_kmers(sequence.upper().encode(), (1 << 64) - 1)


def load_training_genomes(data: Path) -> Genomes:
    return Genomes.load([data / name for name in TRAINING_FILES], data / "genomes.tsv")


def predict(model: KmerModel, fasta: Path, out: Path) -> None:
    """Writes a table with `seq_name` and `virus_score` of each record, NA without a score."""
    with dnaio.open(fasta) as reader:
        records = [(record.name.split()[0], record.sequence) for record in reader]
    scores = model.p_virus(ByteColumn.from_strings(sequence for _, sequence in records))
    rows = [
        f"{name}\t{'NA' if np.isnan(score) else f'{score:.6f}'}"
        for (name, _), score in zip(records, scores, strict=True)
    ]
    out.write_text("\n".join(["seq_name\tvirus_score", *rows]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kmers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    train = actions.add_parser("train")
    apply = actions.add_parser("predict")
    for action, names in ((train, ("data", "model")), (apply, ("model", "fasta", "out"))):
        for name in names:
            action.add_argument(f"--{name}", type=Path, required=True)
    train.add_argument("--pieces", type=int, default=NUM_PIECES, help="of each length")
    arguments = parser.parse_args()
    if arguments.action == "train":
        trained = KmerModel.train(load_training_genomes(arguments.data), LENGTHS, arguments.pieces)
        np.savez(arguments.model, **asdict(trained))
    else:
        with np.load(arguments.model) as arrays:
            predict(KmerModel(**arrays), arguments.fasta, arguments.out)


if __name__ == "__main__":
    main()
