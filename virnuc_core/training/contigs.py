"""Contigs to fit a ContigHead on, its losses, and how new a contig is to it: centroids of its training contigs.

Used by `virnuc train` and by the training of the bundled models, which fits the encoders along with the head.

Shape legend: N rows, C chunks and R contigs of a batch, Z width of a code, K classes, P pieces of contigs, M centroids.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional

from virnuc_core.columns import Bool, Float32, Float64, Int64, concatenated_ranges
from virnuc_core.models.heads import ContigHead
from virnuc_core.models.memory import to_device
from virnuc_core.models.scores import ScoredRows

Run = tuple[int, int]  # consecutive chunks of a record: first, end

MOST_CHUNKS: Final = 24
_NO_CONTIG: Final = -1
MOST_CENTROIDS: Final = 512
# Share of held-out contigs whose calls are not unsure for their novelty alone.
COVERAGE: Final = 0.8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigBatch:
    """R contigs, their chunks and rows, and their labels; a class beyond those of the head is a virus of unknown class.

    Attributes:
        rows: int64 (N,) rows of the data.
        chunk: int64 (N,) chunk of each row.
        contig: int64 (C,) contig of each chunk.
        chunk_class: int64 (C,).
        contig_class: int64 (R,), -1 for a contig that joins a virus and another genome.
        contig_group: int64 (R,) group of relatives, or -1.
    """

    rows: Int64
    chunk: Int64
    contig: Int64
    chunk_class: Int64
    contig_class: Int64
    contig_group: Int64


def make_batch(first_row: Int64, contigs: list[list[Run]], classes: Int64, groups: Int64) -> ContigBatch:
    """A batch of contigs, each of one or more runs; all chunks of the data have a first row, a class and a group.

    `first_row` has the end of the last chunk, too.
    """
    runs = np.array([run for contig in contigs for run in contig])
    contig_of_run = np.repeat(np.arange(len(contigs)), [len(contig) for contig in contigs])
    lengths = runs[:, 1] - runs[:, 0]
    chosen, _ = concatenated_ranges(runs[:, 0], lengths)
    contig = np.repeat(contig_of_run, lengths)
    counts = first_row[chosen + 1] - first_row[chosen]
    rows, _ = concatenated_ranges(first_row[chosen], counts)
    chunk_class = classes[chosen]
    is_single = np.array([len(contig) == 1 for contig in contigs])
    first_chunk = np.searchsorted(contig, np.arange(len(contigs)))
    return ContigBatch(
        rows=rows,
        chunk=np.repeat(np.arange(len(chosen)), counts),
        contig=contig,
        chunk_class=chunk_class,
        contig_class=np.where(is_single, chunk_class[first_chunk], _NO_CONTIG),
        contig_group=np.where(is_single, groups[chosen[first_chunk]], _NO_CONTIG),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRuns:
    """T runs of chunks, each of one record, with C chunks and N rows in all, in order.

    Attributes:
        features: fp32 (N, F), DNA before protein.
        sizes: int64 (N, 2), see `FrameStore.sizes`.
        first_row: int64 (C + 1,), first row of each chunk, and N.
        first_chunk: int64 (T + 1,), first chunk of each run, and C.
        records: int64 (T,), rows of the table of records.
        classes: int64 (T,), index into the classes of the head.
        groups: int64 (T,), related records share a group.
        weights: float64 (T,), sampling probabilities; sum to 1.
    """

    features: Float32
    sizes: Int64
    first_row: Int64
    first_chunk: Int64
    records: Int64
    classes: Int64
    groups: Int64
    weights: Float64

    @property
    def chunk_run(self) -> Int64:
        """int64 (C,): run of each chunk."""
        return np.repeat(np.arange(len(self.classes)), np.diff(self.first_chunk))

    def batches(self, drawn: Iterable[list[list[Run]]]) -> Iterator[ContigBatch]:
        """A batch of each list of contigs, see `make_batch`."""
        classes, groups = self.classes[self.chunk_run], self.groups[self.chunk_run]
        return (make_batch(self.first_row, contigs, classes, groups) for contigs in drawn)


class ContigSampler:
    """Draws contigs from records whose chunks are first_chunk[i]..first_chunk[i + 1] - 1, in proportion to their weights."""

    def __init__(self, first_chunk: Int64, weights: Float64, is_viral: Bool) -> None:
        # A record without chunks is never drawn.
        weights = np.where(np.diff(first_chunk) > 0, weights, 0.0)
        self._first_chunk = first_chunk
        self._cumulative = np.cumsum(weights)
        self._is_viral = is_viral
        self._has_both = len(np.unique(is_viral[weights > 0])) == 2

    def draw(self, scale: float, rng: np.random.Generator) -> list[list[Run]]:
        """Contigs of a batch of about 512 chunks, times `scale` but at least two of each size."""
        contigs: list[list[Run]] = []
        for count, least, most in ((128, 1, 1), (32, 2, 3), (24, 4, 8), (10, 9, MOST_CHUNKS)):
            for _ in range(max(2, round(scale * count))):
                record, run = self._draw_run(draw_size(least, most, rng), rng)
                # Half of the longest are joined from a virus and another genome.
                is_joined = self._has_both and least >= 9 and rng.random() < 0.5
                contigs.append(self._join(record, run, rng) if is_joined else [run])
        return contigs

    def _draw_run(self, size: int, rng: np.random.Generator) -> tuple[int, Run]:
        record = int(np.searchsorted(self._cumulative, rng.random() * self._cumulative[-1], side="right"))
        begin, end = self._first_chunk[record : record + 2].tolist()
        first = int(rng.integers(begin, max(begin + 1, end - size + 1)))
        return record, (first, min(first + size, end))

    def _join(self, record: int, run: Run, rng: np.random.Generator) -> list[Run]:
        """A run with one of the other kind inside it or beside it."""
        other, inner = record, run
        while self._is_viral[other] == self._is_viral[record]:
            other, inner = self._draw_run(int(rng.integers(3, 13)), rng)
        middle = int(rng.integers(run[0], run[1] + 1))
        return [part for part in ((run[0], middle), inner, (middle, run[1])) if part[0] < part[1]]


def draw_size(least: int, most: int, rng: np.random.Generator) -> int:
    """A number of chunks, evenly distributed on a logarithmic scale."""
    return int(np.exp(rng.uniform(np.log(least), np.log(most + 0.99))))


def cut_runs(first_chunk: Int64, rng: np.random.Generator) -> Iterator[tuple[int, Run]]:
    """Cuts each record into runs of 1 to MOST_CHUNKS chunks, one after another; also gives its number."""
    for record, (begin, end) in enumerate(
        zip(first_chunk[:-1].tolist(), first_chunk[1:].tolist(), strict=True)
    ):
        place = begin
        while place < end:
            following = min(place + draw_size(1, MOST_CHUNKS, rng), end)
            yield record, (place, following)
            place = following


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Weights of the parts of the loss; `smoothing` is of labels."""

    row: float = 0.2
    chunk: float = 1.0
    context: float = 0.5
    contig: float = 1.0
    classes: float = 0.4
    relatives: float = 0.05
    smoothing: float = 0.05


def head_losses(
    head: ContigHead, codes: Tensor, batch: ContigBatch, weights: LossWeights
) -> dict[str, Tensor]:
    """The weighted parts of the loss, given the codes (N, Z) of the rows of a batch."""
    whole = np.flatnonzero(batch.contig_class != _NO_CONTIG)
    chunk, contig, chunk_class, contig_class, contig_group, single = (
        to_device(part, codes.device)
        for part in (
            batch.chunk,
            batch.contig,
            batch.chunk_class,
            batch.contig_class[whole],
            batch.contig_group[whole],
            whole,
        )
    )
    pooled = head.chunk_codes(codes, chunk, len(batch.contig))
    contigs = head.contigs(pooled, contig, len(batch.contig_class))
    relatives = _relatives_loss(contigs.embedding[single], contig_group)
    return {
        "row": weights.row * _class_loss(head, head.chunk(codes), chunk_class[chunk], weights),
        "chunk": weights.chunk * _class_loss(head, head.chunk(pooled), chunk_class, weights),
        "context": weights.context * _class_loss(head, contigs.context, chunk_class, weights),
        "contig": weights.contig * _class_loss(head, contigs.logits[single], contig_class, weights),
        "relatives": weights.relatives * relatives,
    }


def _class_loss(head: ContigHead, logits: Tensor, classes: Tensor, weights: LossWeights) -> Tensor:
    """Binary cross-entropy of virus or not, and cross-entropy of the class where it is known."""
    unknown = len(head.spec.classes)
    is_viral = (classes < head.spec.num_virus) | (classes == unknown)
    target = is_viral.float() * (1 - weights.smoothing) + weights.smoothing / 2
    binary = functional.binary_cross_entropy_with_logits(head.virus_margin(logits), target)
    known = functional.cross_entropy(
        logits.float(), classes, ignore_index=unknown, label_smoothing=weights.smoothing
    )
    return binary + weights.classes * known


def _relatives_loss(embedding: Tensor, group: Tensor) -> Tensor:
    """Supervised contrastive loss: contigs of a group are to be near each other, and far from others."""
    similarity = embedding @ embedding.T / 0.1
    itself = torch.eye(len(group), dtype=torch.bool, device=group.device)
    logits = similarity.masked_fill(itself, -1e4)
    log_share = logits - logits.logsumexp(1, keepdim=True)
    is_relative = (group[:, None] == group[None]) & ~itself
    counts = is_relative.sum(1)
    each = -(log_share * is_relative).sum(1) / counts.clamp(min=1)
    return each.sum() / (counts > 0).sum().clamp(min=1)


def fit_novelty(head: ContigHead, train: Float32, held_out: Float32, source: Int64, seed: int = 0) -> None:
    """Sets the head's centroids, and the limit that a fifth of held-out pieces exceed, one piece of each source.

    Args:
        head: that the embeddings are of.
        train: (P, Z) pieces that it was trained on.
        held_out: (Q, Z) pieces of other groups of records.
        source: (Q,) record of each of these.
        seed: of the clustering and the choice of pieces.
    """
    device = head.centroids.device
    head.centroids = torch.from_numpy(fit_centroids(train, seed)).to(device)
    order = np.random.default_rng(seed).permutation(len(source))
    one_of_each = order[np.unique(source[order], return_index=True)[1]]
    if len(one_of_each):
        novelty = head.novelty(torch.from_numpy(held_out[one_of_each]).to(device)).cpu().numpy()
        head.novelty_limit.fill_(float(np.quantile(novelty, COVERAGE, method="inverted_cdf")))
    _log.info(
        "novelty: %d centroids of %d pieces; calls are unsure above %.6f, from %d held-out records",
        len(head.centroids),
        len(train),
        head.novelty_limit,
        len(one_of_each),
    )


def fit_centroids(embeddings: Float32, seed: int = 0) -> Float32:
    """At most `MOST_CENTROIDS` unit vectors (M, Z) that stand for embeddings (P, Z), by k-means of at most 20,000 of them."""
    pieces = np.unique(embeddings, axis=0)
    if len(pieces) > 20_000:
        pieces = np.random.default_rng(seed).choice(pieces, 20_000, replace=False)
    if len(pieces) > MOST_CENTROIDS:
        # In one thread, since the order of sums changes the last digits.
        with threadpool_limits(1):
            pieces = KMeans(MOST_CENTROIDS, n_init=1, random_state=seed).fit(pieces).cluster_centers_
    return np.asarray(pieces / np.linalg.norm(pieces, axis=1, keepdims=True), np.float32)


def embed_pieces(head: ContigHead, runs: LabelledRuns, seed: int = 0) -> tuple[Float32, Int64]:
    """Cuts runs into pieces of 1 to 24 chunks and embeds these, (P, Z); also gives the run of each, (P,)."""

    def read(name: str, begin: int, end: int) -> npt.NDArray[Any]:
        rows = slice(begin, end)
        features, sizes = torch.from_numpy(runs.features[rows]), torch.from_numpy(runs.sizes[rows])
        return np.asarray(head.score_rows(features, sizes)[name].numpy())

    pieces = list(cut_runs(runs.first_chunk, np.random.default_rng(seed)))
    lengths = np.array([end - first for _, (first, end) in pieces], np.int64)
    rows = ScoredRows(
        read=read,
        chunk=np.repeat(np.arange(len(runs.first_row) - 1), np.diff(runs.first_row)),
        contig=np.repeat(np.arange(len(pieces)), lengths),
        num_contigs=len(pieces),
    )
    embedding = head.score_contigs(rows).embedding
    assert embedding is not None
    return embedding, np.array([run for run, _ in pieces], np.int64)
