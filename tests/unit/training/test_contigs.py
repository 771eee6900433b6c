"""Contigs to fit a ContigHead on, the fit, and its temperatures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.made_models import make_contig_head
from virnuc_core.models.heads import ContigHead, HeadSpec, load_head, save_head
from virnuc_core.models.scores import ScoredRows
from virnuc_core.settings import TrainerSettings
from virnuc_core.training.contigs import (
    MOST_CHUNKS,
    ContigSampler,
    LabelledRuns,
    LossWeights,
    cut_runs,
    head_losses,
    make_batch,
)
from virnuc_core.training.fit import fit_contig_temperature, train_contig_head

SPEC = HeadSpec(dna_width=8, protein_width=6, classes=("viral", "bacteria", "plasmid"), num_virus=1)
SETTINGS = TrainerSettings(epochs=3)


def made_runs(count: int, seed: int, gap: float = 1.5) -> LabelledRuns:
    """Runs of 1 to 12 chunks of 1 or 2 rows; single numbers of the vectors tell the classes apart, weakly for a single row."""
    rng = np.random.default_rng(seed)
    classes = rng.choice(3, count, p=(0.5, 0.3, 0.2))
    chunks = rng.integers(1, 13, count)
    rows = rng.integers(1, 3, chunks.sum())
    own = np.repeat(np.repeat(classes, chunks), rows)
    features = rng.normal(3, 1, (len(own), 14)).astype(np.float32)
    features[np.arange(len(own)), np.array([0, 4, 10])[own]] += gap
    return LabelledRuns(
        features=features,
        sizes=rng.integers((10, 160), (50, 500), (len(own), 2)),
        first_row=np.concatenate(([0], np.cumsum(rows))),
        first_chunk=np.concatenate(([0], np.cumsum(chunks))),
        records=np.arange(count),
        classes=classes,
        groups=np.arange(count) // 2,
        weights=np.full(count, 1 / count),
    )


def test_a_batch_has_the_rows_and_labels_of_its_chunks() -> None:
    first_row = np.array([0, 2, 3, 5, 6, 8])
    classes, groups = np.array([0, 0, 0, 1, 1]), np.array([7, 7, 7, 9, 9])
    batch = make_batch(first_row, [[(1, 3)], [(3, 4)], [(0, 1), (3, 5), (2, 3)]], classes, groups)
    assert batch.rows.tolist() == [2, 3, 4, 5, 0, 1, 5, 6, 7, 3, 4]
    assert batch.chunk.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 6]
    assert batch.contig.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert batch.chunk_class.tolist() == [0, 0, 1, 0, 1, 1, 0]
    assert (batch.contig_class.tolist(), batch.contig_group.tolist()) == ([0, 1, -1], [7, 9, -1])


def test_contigs_are_runs_of_one_record_or_joined_from_both_kinds() -> None:
    first_chunk = np.array([0, 40, 40, 43, 90])
    is_viral = np.array([True, True, False, False])
    sampler, rng = (
        ContigSampler(first_chunk, np.array([3.0, 5.0, 1.0, 1.0]), is_viral),
        np.random.default_rng(0),
    )
    contigs = [contig for _ in range(30) for contig in sampler.draw(1.0, rng)]
    record = np.searchsorted(first_chunk, np.arange(90), side="right") - 1
    joined = 0
    drawn = np.zeros(4)
    for contig in contigs:
        own = [set(record[first:end].tolist()) for first, end in contig]
        assert all(len(one) == 1 for one in own)
        kinds = {bool(is_viral[one.pop()]) for one in own}
        joined += len(contig) > 1
        assert len(kinds) == (1 if len(contig) == 1 else 2)
        assert sum(end - first for first, end in contig) <= MOST_CHUNKS + 12
        drawn[record[contig[0][0]]] += len(contig) == 1
    assert joined > 50
    assert drawn[1] == 0
    assert drawn[0] / drawn.sum() == pytest.approx(0.6, abs=0.04)
    alone = ContigSampler(np.array([0, 40]), np.ones(1), np.array([True])).draw(1.0, rng)
    assert {len(contig) for contig in alone} == {1}


def test_runs_are_cut_without_rest() -> None:
    first_chunk = np.array([0, 100, 100, 101])
    cut = list(cut_runs(first_chunk, np.random.default_rng(0)))
    assert [run for _, (first, end) in cut for run in range(first, end)] == list(range(101))
    assert {record for record, _ in cut} == {0, 2}
    assert all(1 <= end - first <= MOST_CHUNKS for _, (first, end) in cut)
    assert max(end - first for _, (first, end) in cut) > 5


def test_a_virus_of_unknown_class_is_a_virus_of_any() -> None:
    head = make_contig_head(6, 5)
    codes = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32))
    first_row, groups = np.arange(7), np.arange(6)
    contigs = [[(number, number + 1)] for number in range(6)]
    weights = LossWeights(classes=0.0)
    losses = [
        head_losses(head, codes, make_batch(first_row, contigs, np.array(classes), groups), weights)
        for classes in ([0, 1, 4, 2, 3, 3], [1, 0, 0, 3, 2, 2], [2, 1, 4, 2, 3, 3])
    ]
    known, other, wrong = (one["chunk"].item() for one in losses)
    assert known == pytest.approx(other)
    assert wrong != pytest.approx(known)


def test_the_temperature_of_contigs_follows_their_length() -> None:
    rng = np.random.default_rng(0)
    num_chunks = rng.choice([1, 4, 20], 60_000)
    margin = rng.normal(0, 2, 60_000)
    is_viral = rng.random(60_000) < 1 / (1 + np.exp(-margin))
    said = margin * (1.5 + 0.4 * np.log(num_chunks))
    found = fit_contig_temperature(said, is_viral, np.ones(60_000), num_chunks)
    np.testing.assert_allclose(found, [1.5, 0.4], atol=0.06)
    certain = fit_contig_temperature(
        np.array([5.0, -5.0]), np.array([True, False]), np.ones(2), np.array([1, 9])
    )
    assert np.isfinite(certain).all()


def test_a_fitted_head_calls_contigs_better_than_chunks(tmp_path: Path) -> None:
    trained = train_contig_head(made_runs(300, 0), made_runs(60, 1), SPEC, SETTINGS, calibrate=True)
    losses = [epoch.validation_loss for epoch in trained.history]
    assert min(losses) == losses[trained.best_epoch - 1]
    assert isinstance(trained.head, ContigHead)
    assert trained.temperature == pytest.approx(float(trained.head.chunk_temperature))
    assert float(trained.head.context_temperature) != 1.0
    save_head(trained.head, tmp_path / "head.safetensors", {})
    head = load_head(tmp_path / "head.safetensors")
    assert isinstance(head, ContigHead)
    test = made_runs(200, 2)
    results = head.score_rows(torch.from_numpy(test.features), torch.from_numpy(test.sizes))
    chunk = np.repeat(np.arange(len(test.first_row) - 1), np.diff(test.first_row))
    rows = ScoredRows(
        read=lambda name, begin, end: results[name][begin:end].numpy(),
        chunk=chunk,
        contig=test.chunk_run,
        num_contigs=200,
    )
    found = head.score_contigs(rows)
    is_viral = test.classes == 0
    right = {
        "chunks": ((found.p_chunk >= 0.5) == is_viral[test.chunk_run]).mean(),
        "context": ((found.p_region >= 0.5) == is_viral[test.chunk_run]).mean(),
        "contigs": ((found.p_contig >= 0.5) == is_viral).mean(),
    }
    assert right["chunks"] > 0.75
    assert right["context"] > right["chunks"] + 0.03
    assert right["contigs"] > 0.9
    others = found.contig_classes[~is_viral, 0] == test.classes[~is_viral]
    assert others.mean() > 0.8
