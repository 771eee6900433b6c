"""Regions from made scores, and their files, read by the rules of each format."""

import csv
import gzip
import math
import re
from contextlib import ExitStack
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from Bio import SeqIO
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability.hostile import HOSTILE_NAMES
from virnuc_core.plain_text import plain_name
from virnuc_core.results.regions import (
    DEFAULT_MODEL,
    LEVELS,
    REGION_SCHEMA,
    ChunkScores,
    Region,
    RegionFiles,
    find_regions,
    level_likelihood,
    posterior,
)
from virnuc_core.results.writers import ResultWriter
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import chunk_table

NAN = float("nan")
STEP = 480  # neighbours overlap by 20 bp
LOW, HIGH = [0.05] * 15, [0.9] * 10
# As GFF3 1.26 has it: letters that a sequence's name may hold as they are.
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
        is_dna_alone=p_virus == 0.3,
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


def test_the_posterior_is_that_of_all_paths_added_up() -> None:
    chunks = chunks_of([0.9, NAN, 0.2, 0.6])
    likelihood = level_likelihood(chunks.p_virus, DEFAULT_MODEL)
    change = 1 - np.exp(-STEP / DEFAULT_MODEL.change_every)
    num = len(LEVELS)
    move = (1 - change) * np.eye(num) + change / num
    first, *rest = likelihood
    paths = np.einsum("a,ab,b,bc,c,cd,d->abcd", first / num, move, rest[0], move, rest[1], move, rest[2])
    viral = [np.moveaxis(paths, axis, 0)[num // 2 :].sum() / paths.sum() for axis in range(4)]
    np.testing.assert_allclose(posterior(chunks, likelihood, DEFAULT_MODEL), viral, rtol=1e-12)


@st.composite
def made_contigs(draw: st.DrawFn) -> list[tuple[int, ChunkScores]]:
    """Contigs cut as in a run: their lengths, and scores of their chunks."""
    contigs = []
    for number, length in enumerate(draw(st.lists(st.integers(1, 9_000), min_size=1, max_size=5))):
        table = chunk_table(np.array([length]), draw(st.sampled_from([60, 300, 500])))
        p_virus = st.lists(st.floats(0, 1) | st.just(NAN), min_size=len(table), max_size=len(table))
        chunks = ChunkScores(
            contig=table.record + number,
            start=table.start,
            end=table.end,
            p_virus=np.array(draw(p_virus), np.float64),
            is_dna_alone=np.arange(len(table)) % 3 == 0,
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
        assert own.is_dna_alone[inside].sum() == region.dna_alone_chunks
        assert abs(region.mean_p - np.nanmean(own.p_virus[inside])) < 1e-9
        assert np.isfinite(region.score)


def region(contig: int, start: int, *, score: float = 25.0) -> Region:
    return Region(
        contig=contig, start=start, end=start + 500, chunks=1, dna_alone_chunks=0, score=score, mean_p=0.75
    )


def write(folder: Path, regions: list[Region], names: list[str]) -> RunFolder:
    run = RunFolder(folder)
    with ExitStack() as stack:
        files = RegionFiles(run, ResultWriter(), stack, 0.5)
        files.extend(regions, names, [10_000] * len(names), lambda contig: b"ACGTTGCAAC"[contig:] * 1000)
    return run


def bed_rows(path: Path) -> list[tuple[str, int, int, str, int]]:
    """The rows of a BED6 file, which has six columns and no header lines."""
    found = []
    for line in path.read_text().splitlines():
        assert not line.startswith(("#", "track", "browser"))
        chrom, start, end, name, score, strand = line.split("\t")
        assert re.fullmatch(r"\S+", chrom)
        assert 0 <= int(start) < int(end)
        assert 0 <= int(score) <= 1000
        assert strand == "."
        found.append((chrom, int(start), int(end), name, int(score)))
    return found


def gff3_rows(path: Path) -> list[tuple[str, int, int, float, dict[str, str]]]:
    """The rows of a GFF3 file: the version first, nine columns, unique IDs, within the sequence-region."""
    version, *lines = path.read_text().splitlines()
    assert version == "##gff-version 3"
    lengths: dict[str, int] = {}
    found = []
    for line in lines:
        if line.startswith("##sequence-region "):
            _, name, first, last = line.split(" ")
            assert (name not in lengths, first) == (True, "1")
            lengths[name] = int(last)
            continue
        seqid, source, kind, start, end, score, strand, phase, attributes = line.split("\t")
        assert GFF3_NAME.fullmatch(seqid)
        assert (source, kind, strand, phase) == ("virnuc", "viral_sequence", ".", ".")
        assert 1 <= int(start) <= int(end) <= lengths[seqid]
        facts = dict(pair.split("=") for pair in attributes.split(";"))
        found.append((unquote(seqid), int(start), int(end), float(score), facts))
    assert len({facts["ID"] for *_, facts in found}) == len(found)
    return found


def test_the_same_regions_in_every_format(tmp_path: Path) -> None:
    regions = [region(0, 0), region(0, 5000, score=250.0), region(2, 40, score=-1.0)]
    run = write(tmp_path, regions, ["k141_1", "k141_2", "k141_3"])
    table = pd.read_csv(run.regions, sep="\t")
    assert table.columns.tolist() == REGION_SCHEMA.names
    assert table.values.tolist() == [
        ["k141_1", 1, 500, 500, 1, 25.0, 0.75, "likely", 0],
        ["k141_1", 5001, 5500, 500, 1, 250.0, 0.75, "confident", 0],
        ["k141_3", 41, 540, 500, 1, -1.0, 0.75, "unsure", 0],
    ]
    pd.testing.assert_frame_equal(pd.read_parquet(run.regions_parquet), table)
    assert bed_rows(run.regions_bed) == [
        ("k141_1", 0, 500, "region_1_likely", 250),
        ("k141_1", 5000, 5500, "region_2_confident", 1000),
        ("k141_3", 40, 540, "region_1_unsure", 0),
    ]
    features = gff3_rows(run.regions_gff3)
    places = list(table[["contig", "start", "end", "score"]].itertuples(index=False, name=None))
    assert [row[:4] for row in features] == places
    counted = {"chunks": "1", "dna_alone_chunks": "0"}
    assert features[1][4] == {"ID": "k141_1.region_2", **counted, "mean_p": "0.750000", "tier": "confident"}
    with gzip.open(run.regions_fasta, "rt") as file:
        records = {record.description: str(record.seq) for record in SeqIO.parse(file, "fasta")}
    assert records == {
        "k141_1:1-500 score=25.00 mean_p=0.750000 tier=likely": "ACGTTGCAAC" * 50,
        "k141_1:5001-5500 score=250.00 mean_p=0.750000 tier=confident": "ACGTTGCAAC" * 50,
        "k141_3:41-540 score=-1.00 mean_p=0.750000 tier=unsure": "GTTGCAAC" * 62 + "GTTG",
    }


ODD_NAMES = [
    "#1",
    "track",
    "browser_x",
    "trackless",
    "gi|1|ref|NC_1.1|",
    "a;b=c&d,e",
    "50%",
    "~",
    ">x",
    "ä/b",
]


@pytest.mark.parametrize("names", [ODD_NAMES, [plain_name(name) for name in HOSTILE_NAMES if name.split()]])
def test_odd_names_are_valid_in_every_format(tmp_path: Path, names: list[str]) -> None:
    run = write(tmp_path, [region(contig, 100) for contig in range(len(names))], names)
    with run.regions.open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [row[0] for row in table[1:]] == names
    assert [unquote(row[0]) for row in bed_rows(run.regions_bed)] == [unquote(name) for name in names]
    assert [row[0] for row in gff3_rows(run.regions_gff3)] == names
