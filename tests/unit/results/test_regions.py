"""Regions from made scores, and their files, read by the rules of each format."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_hostile import HOSTILE_NAMES
from virnuc_core.plain_text import plain_name
from virnuc_core.results.regions import (
    DEFAULT_MODEL,
    LEVELS,
    REGION_SCHEMA,
    ChunkScores,
    Region,
    best_levels,
    find_regions,
    log_odds,
    region_files,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import chunk_table

NAN = float("nan")
STEP = 480  # neighbours overlap by 20 bp
LOW, HIGH = [0.05] * 15, [0.9] * 10
# A BED reader takes some lines for headers; GFF3 1.26 says which letters a name may hold as they are.
BED_NAME = re.compile(r"(?!#|track|browser)\S+")
GFF3_NAME = re.compile(r"(?:[a-zA-Z0-9.:^*$@!+_?|-]|%[0-9A-F]{2})+")


def chunks_of(*contigs: list[float]) -> ChunkScores:
    """Contigs of 500-bp chunks with these scores."""
    counts = [len(scores) for scores in contigs]
    index = np.concatenate([np.arange(count) for count in counts]) if contigs else np.zeros(0)
    start = (STEP * index).astype(np.int64)
    p_virus = np.array([p for scores in contigs for p in scores], np.float64)
    return ChunkScores(
        contig=np.repeat(np.arange(len(contigs)), counts),
        start=start,
        end=start + 500,
        p_virus=p_virus,
    )


def test_an_island_is_found_to_the_chunk() -> None:
    chunks = chunks_of([0.05] * 20 + [0.97] * 10 + [0.05] * 20)
    [region] = find_regions(chunks)
    assert (region.start, region.end, region.chunks) == (20 * STEP, 29 * STEP + 500, 10)
    assert region.mean_p == pytest.approx(0.97)
    assert region.tier == "confident"
    assert find_regions(chunks, threshold=0.9) == [region], "its score does not depend on the threshold"
    assert find_regions(chunks, threshold=0.99) == []


@pytest.mark.parametrize(("number", "tier"), [(1, "unsure"), (2, "likely"), (3, "likely"), (4, "confident")])
def test_scores_are_bounded_so_tiers_ask_for_several_chunks(number: int, tier: str) -> None:
    [region] = find_regions(chunks_of([1.0] * number))
    assert 15 * number < region.score < 16 * number
    assert region.tier == tier


@pytest.mark.parametrize(
    ("contigs", "places"),
    [
        ([HIGH + LOW, LOW + HIGH, HIGH + LOW + HIGH], [(0, 0, 10), (1, 15, 25), (2, 0, 10), (2, 25, 35)]),
        ([[*LOW, 0.9, *LOW]], []),
        ([[*HIGH, 0.05, *HIGH]], [(0, 0, 21)]),
        ([[*LOW, 0.7, 0.35, 0.6, 0.8, 0.4, 0.7, 0.3, 0.75, *LOW]], [(0, 15, 23)]),
        ([[*LOW, 0.9, NAN, 0.9, NAN, NAN, 0.9, 0.9, *LOW]], [(0, 15, 22)]),
        ([LOW + [NAN] * 4 + HIGH + [NAN] * 4 + LOW], [(0, 17, 31)]),  # a border without scores is midway
        ([[NAN] * 9, [NAN]], []),
        ([[NAN] * 40 + [0.9] * 6 + [NAN] * 40], [(0, 35, 51)]),  # 2,500 bp are five chunks
        ([[0.9] * 4 + [NAN] * 40 + [0.9] * 4], [(0, 0, 9), (0, 39, 48)]),
        ([[0.0] * 10, [1.0] * 10], [(1, 0, 10)]),
        ([], []),
    ],
)
def test_places_of_regions(contigs: list[list[float]], places: list[tuple[int, int, int]]) -> None:
    found = find_regions(chunks_of(*contigs))
    assert [(r.contig, r.start // STEP, r.start // STEP + r.chunks) for r in found] == places


@given(st.floats(0, 1), st.floats(0.001, 0.999))
def test_a_single_chunk_is_a_region_when_it_is_called_virus(p_virus: float, threshold: float) -> None:
    for p in (p_virus, threshold, math.nextafter(threshold, 0)):
        assert len(find_regions(chunks_of([p]), threshold=threshold)) == (p >= threshold)
    assert [r.tier for r in find_regions(chunks_of([0.5]))] == ["unsure"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.floats(0.0, 20.0))
def test_no_path_costs_less(p_virus: list[float], least: float) -> None:
    values = log_odds(np.array(p_virus))
    in_variances = min(DEFAULT_MODEL.change_cost, DEFAULT_MODEL.most_change_cost * len(values))
    change = max(least, in_variances * values.var())

    def cost(levels: Sequence[int]) -> float:
        changes = sum(left != right for left, right in pairwise(levels))
        return float(np.sum((values - LEVELS[list(levels)]) ** 2) + change * changes)

    model = replace(DEFAULT_MODEL, least_change_cost=least)
    found = best_levels(values, np.zeros(len(values), np.int64), model).tolist()
    lowest = min(map(cost, product(range(len(LEVELS)), repeat=len(values))))
    assert cost(found) == pytest.approx(lowest, abs=1e-9)


def test_one_chunk_makes_no_region_among_others() -> None:
    for low in np.linspace(0.0, 0.49, 50).tolist():
        assert find_regions(chunks_of([low] * 200 + [1.0] + [low] * 200)) == []


@pytest.mark.parametrize("flank", [4, 6, 12, 40])
def test_a_region_within_a_contig_of_any_length_is_found(flank: int) -> None:
    [region] = find_regions(chunks_of([0.05] * flank + [0.97] * 5 + [0.05] * flank))
    assert (region.start, region.chunks) == (flank * STEP, 5)


@st.composite
def made_contigs(draw: st.DrawFn) -> list[tuple[int, ChunkScores]]:
    """Contigs cut as in a run: their lengths, and scores of their chunks."""
    contigs = []
    for number, length in enumerate(draw(st.lists(st.integers(1, 9_000), min_size=1, max_size=5))):
        table = chunk_table(np.array([length]), draw(st.sampled_from([60, 300, 500])))
        p_virus = st.lists(
            st.floats(0, 1) | st.just(NAN), min_size=len(table.record), max_size=len(table.record)
        )
        chunks = ChunkScores(
            contig=table.record + number,
            start=table.start,
            end=table.end,
            p_virus=np.array(draw(p_virus), np.float64),
        )
        contigs.append((length, chunks))
    return contigs


@given(made_contigs())
def test_regions_of_any_contigs(made: list[tuple[int, ChunkScores]]) -> None:
    names = [field.name for field in fields(ChunkScores)]
    columns = {name: np.concatenate([getattr(chunks, name) for _, chunks in made]) for name in names}
    regions = find_regions(ChunkScores(**columns))
    assert regions == [region for _, chunks in made for region in find_regions(chunks)]
    for left, right in pairwise(regions):
        assert (left.contig, left.end) < (right.contig, right.start)
    for region in regions:
        length, own = made[region.contig]
        assert 0 <= region.start < region.end <= length
        inside = (own.start >= region.start) & (own.end <= region.end)
        assert inside.sum() == region.chunks
        assert abs(region.mean_p - np.nanmean(own.p_virus[inside])) < 1e-9
        assert np.isfinite(region.score)


def written(folder: Path, names: list[str], *places: tuple[int, int, float]) -> RunFolder:
    """The files of regions of 500 bp at these places: contig, start, score."""
    facts = {"chunks": 1, "mean_p": 0.75}
    regions = [
        Region(contig=c, start=start, end=start + 500, score=score, **facts) for c, start, score in places
    ]
    run = RunFolder(folder)
    files = region_files(
        run, regions, names, [10_000] * len(names), lambda contig: b"ACGTTGCAAC"[contig:] * 1000, 0.5
    )
    pq.write_table(*files.pop(run.regions_parquet), run.regions_parquet)
    for path, parts in files.items():
        path.write_bytes(b"".join(parts))
    return run


def test_the_same_regions_in_every_format(tmp_path: Path) -> None:
    names = ["k141_1", "k141_2", "k141_3"]
    run = written(tmp_path, names, (0, 0, 25.0), (0, 5000, 250.0), (2, 40, -1.0))
    table = pd.read_csv(run.regions, sep="\t", names=REGION_SCHEMA.names)
    assert table.values.tolist() == [
        ["k141_1", 1, 500, 500, 1, 25.0, 0.75, "likely"],
        ["k141_1", 5001, 5500, 500, 1, 250.0, 0.75, "confident"],
        ["k141_3", 41, 540, 500, 1, -1.0, 0.75, "unsure"],
    ]
    pd.testing.assert_frame_equal(pd.read_parquet(run.regions_parquet), table)
    assert run.regions_bed.read_text().splitlines() == [
        "k141_1\t0\t500\tregion_1_likely\t250\t.",
        "k141_1\t5000\t5500\tregion_2_confident\t1000\t.",
        "k141_3\t40\t540\tregion_1_unsure\t0\t.",
    ]
    made_by, facts = "\tvirnuc\tviral_sequence\t", "chunks=1;mean_p=0.750000;tier="
    assert run.regions_gff3.read_text().splitlines() == [
        "##sequence-region k141_1 1 10000",
        f"k141_1{made_by}1\t500\t25.00\t.\t.\tID=k141_1.region_1;{facts}likely",
        f"k141_1{made_by}5001\t5500\t250.00\t.\t.\tID=k141_1.region_2;{facts}confident",
        "##sequence-region k141_3 1 10000",
        f"k141_3{made_by}41\t540\t-1.00\t.\t.\tID=k141_3.region_1;{facts}unsure",
    ]
    assert run.regions_fasta.read_text().replace("\n", "") == (
        f">k141_1_1_500{'ACGTTGCAAC' * 50}"
        f">k141_1_5001_5500{'ACGTTGCAAC' * 50}"
        f">k141_3_41_540{'GTTGCAAC' * 62}GTTG"
    )


@pytest.mark.parametrize(
    "names",
    [
        ["#1", "track", "browser_x", "trackless", "gi|1|ref|NC_1.1|", "a;b=c&d,e", "50%", "~", ">x", "ä/b"],
        [plain_name(name) for name in HOSTILE_NAMES if name.split()],
    ],
    ids=["odd", "hostile"],
)
def test_odd_names_are_valid_in_every_format(tmp_path: Path, names: list[str]) -> None:
    run = written(tmp_path, names, *((contig, 100, 25.0) for contig in range(len(names))))
    table, bed, gff3 = (
        [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        for path in (run.regions, run.regions_bed, run.regions_gff3)
    )
    assert [row[0] for row in table] == names
    assert [unquote(row[0]) for row in bed] == [unquote(name) for name in names]
    assert all(len(row) == 6 and BED_NAME.fullmatch(row[0]) for row in bed)
    features = [row for row in gff3 if not row[0].startswith("##")]
    assert [unquote(row[0]) for row in features] == names
    assert all(len(row) == 9 and GFF3_NAME.fullmatch(row[0]) for row in features)
    assert len({row[8].split(";")[0] for row in features}) == len(names)
