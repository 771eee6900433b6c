"""Synthetic contigs are as described, and bases are counted correctly."""

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.region_methods import methods
from benchmarks.regions import (
    LEAST_FLANK,
    SyntheticContig,
    chunk_scores,
    cut_segments,
    evidence,
    overlap,
    paste,
    read_rows,
)
from tests.made_models import MadeModels, plan_run
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.contig_scores import contig_head_of
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.tables import write_tables


def genome(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=length))


def contig(begin: int, end: int, length: int = 1000) -> SyntheticContig:
    return SyntheticContig(name="c", sequence="A" * length, begin=begin, end=end)


def test_contigs_hold_their_segment_where_they_say() -> None:
    viral, windows = {"v": genome(9_000, 1)}, {"w1": genome(40_000, 3), "w2": genome(40_000, 4)}
    cut = [cut_segments(viral, random.Random(seed), {5_000: 3})[5_000] for seed in range(6)]
    segments = [segment for group in cut for segment in group.values()]
    complement = viral["v"][::-1].translate(str.maketrans("ACGT", "TGCA"))
    strands = {segment in viral["v"] for segment in segments}
    assert strands == {segment not in complement for segment in segments} == {True, False}
    contigs = paste(segments, windows, 2, random.Random(0))
    for segment, c in zip([*segments, "", ""], contigs, strict=True):
        assert c.sequence[c.begin : c.end] == segment
        assert any(c.sequence[: c.begin] + c.sequence[c.end :] in window for window in windows.values())
        assert min(c.begin, len(c.sequence) - c.end) >= LEAST_FLANK


def test_bases_are_counted_once_for_each_side() -> None:
    contigs = [contig(100, 300), contig(0, 0), contig(500, 900)]
    found = overlap(contigs, [(0, 50, 200), (1, 10, 20), (2, 500, 900)])
    assert list(found.values()) == [500, 60, 100, 0.8929, 0.8333, 0.8621]
    assert list(overlap(contigs, []).values()) == [0, 0, 600, 0, 0, 0]
    assert list(overlap(contigs, [(0, 50, 200), (2, 500, 900)], {0}).values())[:3] == [100, 50, 100]


@pytest.fixture(scope="module")
def island() -> tuple[list[SyntheticContig], ChunkScores]:
    """A contig of 60 chunks: the middle 20 have high scores, some have none."""
    p_virus = np.array([0.05] * 20 + [0.9] * 20 + [0.05] * 20)
    p_virus[[5, 25, 26, 50]] = np.nan
    start = np.arange(60) * 500
    chunks = ChunkScores(
        contig=np.zeros(60, np.int64),
        start=start,
        end=start + 500,
        p_virus=p_virus,
    )
    return [contig(10_000, 20_000, 30_000)], chunks


@pytest.mark.parametrize("name", [name for name in methods() if name != "chunks alone"])
def test_every_method_finds_an_island(name: str, island: tuple[list[SyntheticContig], ChunkScores]) -> None:
    contigs, chunks = island
    f1 = [
        overlap(contigs, [(r.contig, r.start, r.end) for r in method(chunks)])["f1"]
        for method in methods()[name].values()
    ]
    assert max(f1) == 1.0


def test_evidence_is_by_class(island: tuple[list[SyntheticContig], ChunkScores]) -> None:
    rows = evidence(*island)
    assert sum(row["viral"] for row in rows) == 18
    assert sum(row["other"] for row in rows) == 38
    assert [row["log_ratio"] > 0 for row in rows if row["viral"] or row["other"]] == [False, True]


def test_methods_see_what_the_regions_of_a_run_are_found_from(
    made_models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    made = plan_run(tmp_path / "run", contigs, made_models.config(head=str(made_models.longest_head)))
    made.compute()
    aggregate(made.folder, made.plan, made.store)
    write_tables(made.folder, made.store, head=contig_head_of(made.plan))
    names = [row["contig"] for row in read_rows(made.folder.contigs)]
    found = find_regions(chunk_scores(made.folder.root))
    called = [(row["contig"], int(row["start"]), int(row["end"])) for row in read_rows(made.folder.regions)]
    assert [(names[each.contig], each.start + 1, each.end) for each in found] == called != []
