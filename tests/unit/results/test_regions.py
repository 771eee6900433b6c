"""Regions from synthetic scores, and their files, parsed by the rules of each format."""

import csv
import gzip
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from Bio import SeqIO
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability.crafted import HOSTILE_NAMES
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
# Source: GFF3 1.26, characters that need no escaping in a sequence's name.
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
    [region] = find_regions(chunks_of(LOW + HIGH + LOW))
    assert (region.start, region.end, region.chunks) == (15 * STEP, 24 * STEP + 500, 10)
    assert region.mean_p == pytest.approx(0.9)
    assert region.tier == "confident"


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


def test_the_score_of_a_region_does_not_depend_on_the_threshold() -> None:
    chunks = chunks_of([0.05] * 20 + [0.97] * 10 + [0.05] * 20)
    [usual], [strict] = (find_regions(chunks, threshold=t) for t in (0.5, 0.9))
    assert strict == usual
    assert find_regions(chunks, threshold=0.99) == []


def test_scores_are_bounded_so_tiers_ask_for_several_chunks() -> None:
    assert 15 < find_regions(chunks_of([1.0]))[0].score < 16
    for number, tier in {1: "unsure", 2: "likely", 3: "likely", 4: "confident"}.items():
        [region] = find_regions(chunks_of([0.999] * number))
        assert region.tier == tier


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
def made_chunks(draw: st.DrawFn) -> tuple[ChunkScores, list[int]]:
    """Contigs cut as in a run, with scores; and their lengths."""
    lengths = draw(st.lists(st.integers(1, 9_000), min_size=1, max_size=5))
    table = chunk_table(np.array(lengths), draw(st.sampled_from([60, 300, 500])))
    p_virus = st.floats(0, 1) | st.just(NAN)
    scores = draw(st.lists(p_virus, min_size=len(table), max_size=len(table)))
    chunks = ChunkScores(
        contig=table.record,
        start=table.start,
        end=table.end,
        p_virus=np.array(scores, np.float64),
        is_dna_alone=np.arange(len(table)) % 3 == 0,
    )
    return chunks, lengths


def own_chunks(chunks: ChunkScores, contig: int) -> ChunkScores:
    own = chunks.contig == contig
    names = ("contig", "start", "end", "p_virus", "is_dna_alone")
    return ChunkScores(**{name: getattr(chunks, name)[own] for name in names})


@given(made_chunks())
def test_regions_of_any_contigs(made: tuple[ChunkScores, list[int]]) -> None:
    chunks, lengths = made
    regions = find_regions(chunks)
    for left, right in pairwise(regions):
        assert (left.contig, left.end) < (right.contig, right.start)
    for region in regions:
        assert 0 <= region.start < region.end <= lengths[region.contig]
        own = own_chunks(chunks, region.contig)
        inside = (own.start >= region.start) & (own.end <= region.end)
        assert inside.sum() == region.chunks
        assert own.is_dna_alone[inside].sum() == region.dna_alone_chunks
        assert abs(region.mean_p - np.nanmean(own.p_virus[inside])) < 1e-9
        assert np.isfinite(region.score)
    for contig in range(len(lengths)):
        alone = find_regions(own_chunks(chunks, contig))
        assert alone == [region for region in regions if region.contig == contig]


def region(contig: int, start: int, *, score: float = 25.0) -> Region:
    return Region(
        contig=contig, start=start, end=start + 500, chunks=1, dna_alone_chunks=0, score=score, mean_p=0.75
    )


def sequence_of(contig: int) -> bytes:
    return b"ACGTTGCAAC"[contig:] * 1000


def write(folder: Path, regions: list[Region], names: list[str]) -> RunFolder:
    run = RunFolder(folder)
    with ExitStack() as stack:
        files = RegionFiles(run, ResultWriter(), stack, 0.5)
        files.extend(regions, names, [10_000] * len(names), sequence_of)
    return run


def bed_rows(path: Path) -> Iterator[tuple[str, int, int, str, int]]:
    """Parses BED6: no header lines, six columns."""
    for line in path.read_text().splitlines():
        assert not line.startswith(("#", "track", "browser"))
        chrom, start, end, name, score, strand = line.split("\t")
        assert re.fullmatch(r"\S+", chrom)
        assert 0 <= int(start) < int(end)
        assert 0 <= int(score) <= 1000
        assert strand == "."
        yield chrom, int(start), int(end), name, int(score)


def gff3_rows(path: Path) -> Iterator[tuple[str, int, int, float, dict[str, str]]]:
    """Parses GFF3: version first, nine columns, attributes, unique IDs, within the sequence-region."""
    lines = path.read_text().splitlines()
    assert lines[0] == "##gff-version 3"
    lengths: dict[str, int] = {}
    ids: set[str] = set()
    for line in lines[1:]:
        if line.startswith("##sequence-region "):
            _, name, first, last = line.split(" ")
            assert name not in lengths
            assert first == "1"
            lengths[name] = int(last)
            continue
        seqid, source, kind, start, end, score, strand, phase, attributes = line.split("\t")
        assert GFF3_NAME.fullmatch(seqid)
        assert (source, kind, strand, phase) == ("virnuc", "viral_sequence", ".", ".")
        assert 1 <= int(start) <= int(end) <= lengths[seqid]
        facts = dict(pair.split("=") for pair in attributes.split(";"))
        assert facts["ID"] not in ids
        ids.add(facts["ID"])
        yield unquote(seqid), int(start), int(end), float(score), facts


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
    assert list(bed_rows(run.regions_bed)) == [
        ("k141_1", 0, 500, "region_1_likely", 250),
        ("k141_1", 5000, 5500, "region_2_confident", 1000),
        ("k141_3", 40, 540, "region_1_unsure", 0),
    ]
    features = list(gff3_rows(run.regions_gff3))
    assert [row[:4] for row in features] == [
        ("k141_1", 1, 500, 25.0),
        ("k141_1", 5001, 5500, 250.0),
        ("k141_3", 41, 540, -1.0),
    ]
    counted = {"chunks": "1", "dna_alone_chunks": "0"}
    assert features[1][4] == {"ID": "k141_1.region_2", **counted, "mean_p": "0.750000", "tier": "confident"}
    with gzip.open(run.regions_fasta, "rt") as file:
        records = {record.description: str(record.seq) for record in SeqIO.parse(file, "fasta")}
    assert records == {
        "k141_1:1-500 score=25.00 mean_p=0.750000 tier=likely": sequence_of(0)[:500].decode(),
        "k141_1:5001-5500 score=250.00 mean_p=0.750000 tier=confident": sequence_of(0)[5000:5500].decode(),
        "k141_3:41-540 score=-1.00 mean_p=0.750000 tier=unsure": sequence_of(2)[40:540].decode(),
    }


def test_no_regions(tmp_path: Path) -> None:
    run = write(tmp_path, [], ["a"])
    assert len(pd.read_csv(run.regions, sep="\t")) == 0
    assert list(bed_rows(run.regions_bed)) == list(gff3_rows(run.regions_gff3)) == []
    assert pd.read_parquet(run.regions_parquet).columns.tolist() == REGION_SCHEMA.names
    assert gzip.decompress(run.regions_fasta.read_bytes()) == b""


@pytest.mark.parametrize(
    "names",
    [
        ["#1", "track", "browser_x", "trackless", "gi|1|ref|NC_1.1|", "a;b=c&d,e", "50%", "~", ">x", "ä/b"],
        [plain_name(name) for name in HOSTILE_NAMES if name.split()],
    ],
)
def test_odd_names_are_valid_in_every_format(tmp_path: Path, names: list[str]) -> None:
    run = write(tmp_path, [region(contig, 100) for contig in range(len(names))], names)
    with run.regions.open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [row[0] for row in table[1:]] == names
    assert [unquote(row[0]) for row in bed_rows(run.regions_bed)] == [unquote(name) for name in names]
    assert [row[0] for row in gff3_rows(run.regions_gff3)] == names
