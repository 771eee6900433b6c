"""Centroids and limit of novelty: what stands for the training contigs, and what a head says of others."""

import numpy as np
import numpy.typing as npt
import torch

from tests.made_models import make_contig_head
from tests.unit.training.test_contigs import made_runs
from virnuc_core.training.contigs import MOST_CENTROIDS, embed_pieces, fit_centroids, fit_novelty


def unit_vectors(count: int, seed: int, width: int = 64) -> npt.NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_few_pieces_are_their_own_centroids() -> None:
    pieces = unit_vectors(9, 0)
    found = fit_centroids(np.concatenate((pieces, pieces[:4])))
    np.testing.assert_allclose(found, np.unique(pieces, axis=0), rtol=1e-6)
    assert fit_centroids(pieces[:0]).shape == (0, 64)


def test_many_pieces_have_some_centroids_each_near_to_its_own() -> None:
    centres = unit_vectors(MOST_CENTROIDS // 2, 1)
    pieces = np.repeat(centres, 4, axis=0) + 0.02 * unit_vectors(2 * MOST_CENTROIDS, 2)
    found = fit_centroids(pieces)
    assert found.shape == (MOST_CENTROIDS, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    assert (pieces @ found.T).max(1).min() > 0.99
    assert np.array_equal(fit_centroids(pieces), found), "as often as one likes"


def test_novelty_is_the_distance_to_the_nearest_centroid() -> None:
    head = make_contig_head(8, 6)
    asked = unit_vectors(20, 4)
    assert head.novelty(torch.from_numpy(asked)).isnan().all()
    train, held_out = unit_vectors(30, 3), unit_vectors(50, 5)
    source = np.repeat(np.arange(25), 2)
    fit_novelty(head, train, held_out, source)
    expected = 1 - (asked @ train.T).max(1)
    np.testing.assert_allclose(head.novelty(torch.from_numpy(asked)), expected, atol=1e-6)
    assert head.novelty(torch.from_numpy(train)).max() < 1e-6
    # A fifth of the sources, one piece of each, exceed the limit.
    novelty = 1 - (held_out @ train.T).max(1)
    pairs = np.sort(novelty.reshape(25, 2), axis=1)
    limit = float(head.novelty_limit)
    assert (pairs[:, 0] > limit + 1e-6).sum() <= 5 <= (pairs[:, 1] > limit + 1e-6).sum()
    assert np.abs(novelty - limit).min() < 1e-6


def test_pieces_of_runs_are_embedded_as_contigs_of_their_own() -> None:
    runs, head = made_runs(12, seed=0), make_contig_head(8, 6)
    embeddings, run = embed_pieces(head, runs)
    assert set(run.tolist()) == set(range(12))
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    [whole, *_] = np.flatnonzero(np.bincount(run)[run] == 1)
    begin, end = runs.first_chunk[run[whole] : run[whole] + 2]
    rows = slice(runs.first_row[begin], runs.first_row[end])
    features, sizes = torch.from_numpy(runs.features[rows]), torch.from_numpy(runs.sizes[rows])
    chunk = np.repeat(np.arange(end - begin), np.diff(runs.first_row[begin : end + 1]))
    codes = head.chunk_codes(
        head.score_rows(features, sizes)["codes"].float(), torch.from_numpy(chunk), int(end - begin)
    )
    expected = head.contigs(codes, torch.zeros(len(codes), dtype=torch.int64), 1).embedding
    np.testing.assert_allclose(embeddings[whole], expected[0], atol=1e-5)
