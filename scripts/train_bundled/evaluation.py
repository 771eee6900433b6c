"""Measures a network on genomes, cut into chunks and contigs as in a prediction run."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from scripts.train_bundled.data import Chunks, DeviceChunks, View, cut
from scripts.train_bundled.genomes import CLASSES, Genomes
from scripts.train_bundled.network import Network, Tokens
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.memory import to_device
from virnuc_core.training.contigs import COVERAGE
from virnuc_core.training.fit import fit_contig_temperature, fit_temperature

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_CHUNK_LENGTHS: Final = (300, 500, 2000)
# Lengths of contigs and of the chunks that they are cut into.
_CONTIGS: Final = (
    (1000, 500),
    (3000, 500),
    (3000, 1000),
    (5000, 500),
    (5000, 1000),
    (5000, 2000),
    (10000, 1000),
    (10000, 2000),
    (20000, 2000),
    (20000, 4000),
)
_BATCH_CHUNKS: Final = 1024


@torch.inference_mode()
def chunk_codes(network: Network, chunks: Chunks) -> torch.Tensor:
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


def pieces(genomes: Genomes, length: int) -> Genomes:
    """Consecutive pieces of this length; a shorter rest is left out."""
    counts = genomes.bases.lengths // length
    record = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = genomes.bases.offsets[record] + place * length
    index = (starts[:, None] + np.arange(length)).ravel()
    cut_up = ByteColumn(genomes.bases.data[index], np.arange(len(record) + 1) * length)
    return genomes.of(record, cut_up)


@torch.inference_mode()
def evaluate(
    network: Network,
    genomes: Genomes,
    tokenizer: DnabertTokenizer,
) -> dict[str, object]:
    """Figures over all chunks and contigs; those without a row count as the least viral."""
    figures: dict[str, object] = {}
    for length in _CHUNK_LENGTHS:
        chunks = cut(genomes, View(chunk_length=length), tokenizer)
        logits = network.head.chunk(chunk_codes(network, chunks))
        margins = network.head.virus_margin(logits).double().cpu().numpy()
        figures[f"chunks of {length} bp"] = _figures(genomes, chunks.record, margins, logits)
    for length, chunk_length in _CONTIGS:
        contigs = pieces(genomes, length)
        chunks = cut(contigs, View(chunk_length=chunk_length), tokenizer)
        record = to_device(chunks.record, network.head.gate.weight.device)
        codes = chunk_codes(network, chunks)
        found = network.head.contigs(codes, record, len(contigs.classes))
        margins = network.head.virus_margin(found.logits).double().cpu().numpy()
        chunk_margins = network.head.virus_margin(network.head.chunk(codes)).double().cpu().numpy()
        mean = np.bincount(chunks.record, chunk_margins, len(margins)) / np.maximum(
            1, np.bincount(chunks.record, minlength=len(margins))
        )
        own = _figures(contigs, np.arange(len(margins)), margins, found.logits)
        own["auroc of the mean"] = round(float(roc_auc_score(contigs.is_viral, mean)), 4)
        embedded = np.unique(chunks.record)
        is_wrong = ((margins > 0) != contigs.is_viral)[embedded]
        novelty = network.head.novelty(found.embedding).cpu().numpy()[embedded]
        own |= _novelty_figures(novelty, is_wrong, float(network.head.novelty_limit))
        figures[f"contigs of {length} bp, chunks of {chunk_length}"] = own
    return figures


def _novelty_figures(novelty: Float32, is_wrong: npt.NDArray[np.bool_], limit: float) -> dict[str, object]:
    """Errors by novelty, and the share of contigs that are unsure for it."""
    ratio = errors_by_novelty(novelty, is_wrong)
    return {
        "errors": round(float(is_wrong.mean()), 4),
        f"errors of the {COVERAGE:.0%} least novel, over all": None if np.isnan(ratio) else round(ratio, 3),
        "unsure for novelty": round(float((novelty > limit).mean()), 3),
    }


def errors_by_novelty(novelty: Float32, is_wrong: npt.NDArray[np.bool_], coverage: float = COVERAGE) -> float:
    """Share of wrong calls among the least novel of n contigs, a share of `coverage`, over the share among all of them.

    Below 1, novel contigs are called wrongly more often than others. Equally novel contigs at the limit count in part, each
    alike. NaN without a wrong call.
    """
    levels, level = np.unique(novelty, return_inverse=True)
    counts = np.bincount(level, minlength=len(levels))
    wrong = np.bincount(level, is_wrong, len(levels))
    covered = coverage * len(novelty)
    taken = np.clip(covered - (np.cumsum(counts) - counts), 0, counts)
    total = wrong.sum()
    return float((taken / counts * wrong).sum() / covered / (total / len(novelty))) if total else np.nan


def _figures(
    genomes: Genomes, record: npt.NDArray[np.int64], margins: Float64, logits: torch.Tensor
) -> dict[str, object]:
    is_viral = genomes.is_viral[record]
    known = genomes.classes[record] < len(CLASSES)
    best = logits.argmax(1).cpu().numpy()
    sources = np.array(genomes.sources)[record]
    called = margins > 0
    return {
        "count": len(margins),
        "auroc": round(float(roc_auc_score(is_viral, margins)), 4),
        "auprc": round(float(average_precision_score(is_viral, margins)), 4),
        "class right": round(float((best == genomes.classes[record])[known].mean()), 4),
        "called": {
            name: round(float(called[sources == name].mean()), 3) for name in np.unique(sources).tolist()
        },
    }


@torch.inference_mode()
def calibrate(network: Network, genomes: Genomes, tokenizer: DnabertTokenizer) -> None:
    """Sets the head's temperatures on genomes that were not trained on.

    Those of chunks, alone and in context, and of contigs by their number of chunks; each set of lengths counts alike.
    """
    head, device = network.head, network.head.gate.weight.device
    alone, context, whole = _Labelled(), _Labelled(), _Labelled()
    counts = []
    for length in _CHUNK_LENGTHS:
        chunks = cut(genomes, View(chunk_length=length), tokenizer)
        logits = head.chunk(chunk_codes(network, chunks))
        alone.add(head.virus_margin(logits), genomes.is_viral[chunks.record])
    for length, chunk_length in _CONTIGS:
        contigs = pieces(genomes, length)
        chunks = cut(contigs, View(chunk_length=chunk_length), tokenizer)
        record = to_device(chunks.record, device)
        found = head.contigs(chunk_codes(network, chunks), record, len(contigs.classes))
        context.add(head.virus_margin(found.context), contigs.is_viral[chunks.record])
        whole.add(head.virus_margin(found.logits), contigs.is_viral)
        counts.append(np.bincount(chunks.record, minlength=len(contigs.classes)))
    head.chunk_temperature.fill_(fit_temperature(*alone.joined()))
    head.context_temperature.fill_(fit_temperature(*context.joined()))
    fitted = fit_contig_temperature(*whole.joined(), np.concatenate(counts))
    head.contig_temperature.copy_(torch.from_numpy(fitted))


class _Labelled:
    """Log-odds of several sets with their labels, and weights with which each set counts alike, and so does each side of it."""

    def __init__(self) -> None:
        self._parts: list[tuple[Float64, npt.NDArray[np.bool_], Float64]] = []

    def add(self, margins: torch.Tensor, is_viral: npt.NDArray[np.bool_]) -> None:
        weights = np.where(is_viral, 0.5 / max(1, is_viral.sum()), 0.5 / max(1, (~is_viral).sum()))
        self._parts.append((margins.double().cpu().numpy(), is_viral, weights))

    def joined(self) -> tuple[Float64, npt.NDArray[np.bool_], Float64]:
        """All margins, labels and weights (n,)."""
        margins, labels, weights = map(np.concatenate, zip(*self._parts, strict=True))
        return margins, labels, weights
