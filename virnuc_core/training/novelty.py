"""How new a contig is to a head: centroids of its training contigs, and the distance above which a call is unsure.

Shape legend: P pieces of contigs, Z width of an embedding, M centroids.
"""

import logging
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from virnuc_core.models.heads import ContigHead
from virnuc_core.models.scores import ScoredRows
from virnuc_core.training.contigs import LabelledRuns, cut_runs

MOST_CENTROIDS: Final = 512
# Share of held-out contigs whose calls are not unsure for their novelty alone.
COVERAGE: Final = 0.8
_MOST_PIECES: Final = 20_000

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


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
    if len(pieces) > _MOST_PIECES:
        pieces = np.random.default_rng(seed).choice(pieces, _MOST_PIECES, replace=False)
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
