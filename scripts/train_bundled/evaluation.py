"""Measures and calibrates a network on genomes, cut into chunks and contigs as in a prediction run."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from torch import Tensor

from scripts.train_bundled.data import Chunks, DeviceChunks
from scripts.train_bundled.genomes import CLASSES, Genomes
from scripts.train_bundled.network import Network, Tokens
from virnuc_core.columns import ByteColumn
from virnuc_core.models.memory import to_device
from virnuc_core.training.fit import cross_entropy, fit_contig_temperature, fit_temperature
from virnuc_core.training.metrics import calibration_error

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Lengths of contigs, 0 for whole records whose chunks are measured alone, and of the chunks.
RANKED_SETS: Final = ((0, 500), (5000, 1000))
CALIBRATION_SETS: Final = (
    (0, 300),
    (0, 500),
    (0, 1000),
    (1000, 500),
    (3000, 1000),
    (5000, 500),
    (5000, 1000),
    (10000, 1000),
    (20000, 1000),
)
_BATCH_CHUNKS: Final = 1024
# Chunks of families unlike all that was trained on are called wrongly more often than those of held-out groups; so much wider,
# the probabilities of `--far` are right.
_CHUNK_WIDENING: Final = 1.4


@dataclass(frozen=True, slots=True)
class Sample:
    """Genomes, or pieces of this length of them, and their chunks."""

    length: int
    chunk_length: int
    genomes: Genomes
    chunks: Chunks

    @property
    def name(self) -> str:
        if not self.length:
            return f"chunks of {self.chunk_length} bp"
        return f"contigs of {self.length} bp, chunks of {self.chunk_length}"

    @property
    def record(self) -> Int64:
        """int64 (n,): the genome of each of what is measured, chunks or contigs."""
        return np.arange(len(self.genomes.classes)) if self.length else self.chunks.record

    @property
    def is_viral(self) -> Bool:
        return self.genomes.is_viral[self.record]

    @property
    def num_chunks(self) -> Int64:
        """int64 (R,): of each genome."""
        return np.bincount(self.chunks.record, minlength=len(self.genomes.classes))

    @property
    def weights(self) -> Float64:
        """float64 (n,): viruses and others count alike, and so does every source of others; they sum to 1."""
        kinds = np.where(self.is_viral, "viral", np.array(self.genomes.sources)[self.record])
        names, kind, counts = np.unique(kinds, return_inverse=True, return_counts=True)
        share = np.where(names == "viral", 0.5, 0.5 / max(1, len(names) - 1))
        weights: Float64 = (share / counts)[kind]
        return np.asarray(weights / weights.sum())


def pieces(genomes: Genomes, length: int) -> Genomes:
    """Consecutive pieces of this length, without a shorter rest; by 0 the genomes as they are."""
    if not length:
        return genomes
    counts = genomes.bases.lengths // length
    record = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = genomes.bases.offsets[record] + place * length
    index = (starts[:, None] + np.arange(length)).ravel()
    cut_up = ByteColumn(genomes.bases.data[index], np.arange(len(record) + 1) * length)
    return genomes.of(record, cut_up)


@torch.inference_mode()
def chunk_codes(network: Network, chunks: Chunks) -> Tensor:
    device = network.head.gate.weight.device
    view = DeviceChunks.build(chunks, 1, device)
    codes = []
    for begin in range(0, len(chunks.record), _BATCH_CHUNKS):
        end = min(begin + _BATCH_CHUNKS, len(chunks.record))
        rows = np.arange(chunks.first_row[begin], chunks.first_row[end])
        own = np.repeat(np.arange(end - begin), np.diff(chunks.first_row[begin : end + 1]))
        protein = Tokens.take(view.protein, rows, network.esm2)
        dna = Tokens.take(view.dna, rows, network.dnabert)
        vectors, _ = network.vectors(protein, dna)
        row_codes = network.head.row_codes(*vectors, to_device(chunks.sizes[rows], device))
        codes.append(network.head.chunk_codes(row_codes, to_device(own, device), end - begin))
    return torch.cat(codes)


@torch.inference_mode()
def evaluate(network: Network, samples: list[Sample]) -> dict[str, dict[str, float]]:
    """AUROC, calibration error, share of right classes, and what is called virus of each source, by sample."""
    return {sample.name: _figures(network, sample) for sample in samples}


def _figures(network: Network, sample: Sample) -> dict[str, float]:
    head, device = network.head, network.head.gate.weight.device
    codes = chunk_codes(network, sample.chunks)
    if sample.length:
        record = to_device(sample.chunks.record, device)
        logits = head.contigs(codes, record, len(sample.genomes.classes)).logits
        margins = _numbers(head.contig_margin(logits, to_device(sample.num_chunks, device)))
    else:
        logits = head.chunk(codes)
        margins = _numbers(head.chunk_margin(logits))
    is_viral, classes = sample.is_viral, sample.genomes.classes[sample.record]
    balanced = np.where(is_viral, 0.5 / is_viral.sum(), 0.5 / (~is_viral).sum())
    is_right = logits.argmax(1).cpu().numpy() == classes
    sources = np.array(sample.genomes.sources)[sample.record]
    return {
        "count": len(margins),
        "auroc": round(float(roc_auc_score(is_viral, margins)), 4),
        "calibration error": calibration_error(1 / (1 + np.exp(-margins)), is_viral, balanced) or 0.0,
        "class right": round(float(is_right[classes < len(CLASSES)].mean()), 4),
        **{
            f"called: {name}": round(float((margins > 0)[sources == name].mean()), 3)
            for name in np.unique(sources).tolist()
        },
    }


@torch.inference_mode()
def calibrate(network: Network, samples: list[Sample]) -> None:
    """Sets biases and temperatures of the head on genomes that were not trained on; every sample counts alike.

    Those of chunks, alone and in context, and of contigs by their number of chunks.
    """
    head, device = network.head, network.head.gate.weight.device
    alone, context, whole = _Labelled(), _Labelled(), _Labelled()
    for sample in samples:
        codes = chunk_codes(network, sample.chunks)
        if not sample.length:
            alone.add(head.virus_margin(head.chunk(codes)), sample.is_viral, sample.weights)
            continue
        record = sample.chunks.record
        found = head.contigs(codes, to_device(record, device), len(sample.genomes.classes))
        chunk_weights = (sample.weights / np.maximum(1, sample.num_chunks))[record]
        context.add(head.virus_margin(found.context), sample.is_viral[record], chunk_weights)
        whole.add(head.virus_margin(found.logits), sample.is_viral, sample.weights)
    num_chunks = np.concatenate([sample.num_chunks for sample in samples if sample.length])
    virus = slice(head.spec.num_virus)
    for labelled, name in ((alone, "chunk.3"), (context, "context"), (whole, "contig.3")):
        head.get_parameter(f"{name}.bias")[virus] += labelled.center()
    head.chunk_temperature.fill_(_CHUNK_WIDENING * fit_temperature(*alone.joined()))
    head.context_temperature.fill_(fit_temperature(*context.joined()))
    fitted = fit_contig_temperature(*whole.joined(), num_chunks)
    head.contig_temperature.copy_(torch.from_numpy(fitted))


class _Labelled:
    """Log-odds of several samples with their labels and weights."""

    def __init__(self) -> None:
        self._parts: list[tuple[Float64, Bool, Float64]] = []
        self._offset = 0.0

    def add(self, margins: Tensor, is_viral: Bool, weights: Float64) -> None:
        self._parts.append((_numbers(margins), is_viral, weights))

    def joined(self) -> tuple[Float64, Bool, Float64]:
        """All margins, labels and weights (n,)."""
        margins, labels, weights = map(np.concatenate, zip(*self._parts, strict=True))
        return margins + self._offset, labels, weights

    def center(self) -> float:
        """Adds to all margins what gives, with its best temperature, the smallest cross-entropy, and returns it."""
        margins, labels, weights = self.joined()

        def loss(parameters: Float64) -> float:
            offset, log_temperature = parameters
            return cross_entropy((margins + offset) / np.exp(log_temperature), labels, weights)

        self._offset = float(minimize(loss, np.zeros(2), method="Nelder-Mead").x[0])
        return self._offset


def _numbers(margins: Tensor) -> Float64:
    return np.asarray(margins.double().cpu().numpy())
