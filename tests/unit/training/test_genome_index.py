"""The index of training genomes: which pieces it holds, and where its limits come from."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.made_models import make_contig_head
from tests.unit.training.test_contigs import made_runs
from virnuc_core.results.nearest import LEAST_CHUNKS, RANKS
from virnuc_core.training import genome_index
from virnuc_core.training.genome_index import LabelledPieces, build_index, embed_pieces

GENERA, OF_GENUS, PIECES = 60, 6, 3


def unit(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def made_pieces(families: range, seed: int) -> LabelledPieces:
    """Pieces of genomes: four genera a family, six genomes a genus; genera of a family, and families of a class, are near."""
    of_classes = np.random.default_rng(7).standard_normal((2, 64))
    rng = np.random.default_rng(seed)
    embeddings, genome, names, labels = [], [], [], []
    for family in families:
        of_family = of_classes[family % 2] + 0.9 * np.random.default_rng(family).standard_normal(64)
        for genus in range(4):
            of_genus = of_family + 0.5 * np.random.default_rng((family, genus)).standard_normal(64)
            for member in range(OF_GENUS):
                embeddings.append(of_genus + 0.15 * rng.standard_normal((PIECES, 64)))
                genome += [len(names)] * PIECES
                names.append(f"genome {family}.{genus}.{member}")
                labels.append((f"class {family % 2}", f"family {family}", f"genus {family}.{genus}"))
    columns = zip(*labels, strict=True)
    return LabelledPieces(
        embeddings=unit(np.concatenate(embeddings)),
        genome=np.array(genome),
        num_chunks=np.array((1, 3, 6))[np.arange(len(genome)) % PIECES],
        names=names,
        lineages=dict(zip(RANKS, columns, strict=True)),
        groups=np.arange(len(names)) // OF_GENUS,
    )


def test_limits_hold_for_genomes_that_were_not_held_out() -> None:
    train, held_out = made_pieces(range(20), 0), made_pieces(range(20, 40), 1)
    index = build_index(train, held_out, "0123")
    assert index.head == "0123"
    assert {index.lineage(row)["family"] for row in range(len(index))} == {f"family {n}" for n in range(20)}
    assert set(index.names.values) <= set(train.names)
    cuts = [cut for cut in index.cuts if cut is not None]
    assert len(cuts) == 3
    assert cuts == sorted(cuts)
    assert cuts[0] < cuts[2]
    # Other genomes of the genera that it was built from, and of families that nobody has seen.
    for families, least, most in ((range(20), 0.9, 1.0), (range(40, 60), 0.0, 0.1)):
        other = made_pieces(families, 2)
        found = index.search(other.embeddings)
        named = index.supported_ranks(found) >= 1
        assert least <= named.mean() <= most
        right = index.lineages[1].equal(found.rows[:, 0], other.labels["family"])
        assert right[named].mean() > 0.95 if families.start == 0 else True
    assert index.unsure_above is not None
    novelty = index.search(held_out.embeddings).novelty
    assert (novelty > index.unsure_above).mean() == pytest.approx(0.2, abs=0.08)
    assert index.search(train.embeddings).novelty.max() < index.unsure_above


def test_an_index_is_bounded_and_no_group_crowds_out_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = made_pieces(range(10), 0)
    large = np.flatnonzero(pieces.groups[pieces.genome] == 0)
    more = pieces.take(np.concatenate((np.repeat(large, 30), np.arange(len(pieces.genome)))))
    noise = np.random.default_rng(0).standard_normal(more.embeddings.shape)
    more = replace(more, embeddings=unit(more.embeddings + 0.05 * noise))
    nothing = more.take(np.empty(0, np.int64))
    monkeypatch.setattr(genome_index, "_MOST_PIECES", 500)
    index = build_index(more, nothing, "")
    assert (index.cuts, index.unsure_above) == ((None,) * 3, None)
    assert 300 < len(index) <= 500
    groups, counts = np.unique(index.lineages[2].codes, return_counts=True)
    assert len(groups) == 40
    assert counts.max() <= 2 * counts.min() + 3
    monkeypatch.setattr(genome_index, "_MOST_PIECES", 50)
    few = build_index(more, nothing, "")
    assert len(few) == 50
    assert len(np.unique(few.lineages[1].codes)) == 10


def test_cuts_are_of_pieces_of_several_chunks() -> None:
    """Single chunks that are near anything would support nothing."""
    train, held_out = made_pieces(range(20), 0), made_pieces(range(20, 40), 1)
    rng, is_short = np.random.default_rng(5), held_out.num_chunks < LEAST_CHUNKS
    embeddings = held_out.embeddings.copy()
    embeddings[is_short] = train.embeddings[rng.integers(0, len(train.genome), is_short.sum())]
    confusing = replace(held_out, embeddings=embeddings)
    assert build_index(train, confusing, "").cuts[0] is not None
    everything = replace(confusing, num_chunks=np.full(len(confusing.genome), LEAST_CHUNKS))
    assert build_index(train, everything, "").cuts[2] is None


def test_one_piece_stands_for_others_like_it() -> None:
    pieces = made_pieces(range(2), 0)
    same = replace(
        pieces, embeddings=np.ones_like(pieces.embeddings), num_chunks=np.ones_like(pieces.num_chunks)
    )
    assert len(build_index(same, same, "")) == 8, "one of each group"
    assert len(build_index(replace(same, num_chunks=pieces.num_chunks), same, "")) == 8 * PIECES, (
        "and of each kind"
    )


def test_labels_are_made_fit_for_tables() -> None:
    pieces = replace(made_pieces(range(1), 0), names=["=1\t\n"] * 4 * OF_GENUS)
    index = build_index(pieces, pieces, "")
    assert index.names[0] == "%3D1%09%0A"


def test_pieces_are_embedded_as_the_contigs_of_a_run() -> None:
    head, runs = make_contig_head(8, 6), made_runs(20, 0)
    embeddings, run, num_chunks = embed_pieces(head, runs, seed=3)
    _, codes = head.score_rows(torch.from_numpy(runs.features), torch.from_numpy(runs.sizes))
    again = embed_pieces(head, runs, seed=3)
    assert np.array_equal(embeddings, again[0])
    assert set(run.tolist()) == set(range(20))
    assert set(np.digitize(num_chunks, (2, 6)).tolist()) == {0, 1, 2}
    # Runs that were not cut are contigs.
    whole = np.flatnonzero(np.bincount(run) == 1)
    assert len(whole) > 3
    for number in whole.tolist():
        first, end = runs.first_chunk[number : number + 2]
        rows = slice(runs.first_row[first], runs.first_row[end])
        chunk = np.repeat(np.arange(end - first), np.diff(runs.first_row[first : end + 1]))
        pooled = head.chunk_codes(codes[rows].float(), torch.from_numpy(chunk), int(end - first))
        found = head.contigs(pooled, torch.zeros(len(pooled), dtype=torch.int64), 1).embedding[0].numpy()
        [piece] = np.flatnonzero(run == number)
        np.testing.assert_allclose(embeddings[piece], found, atol=1e-5)
        assert num_chunks[piece] == end - first
