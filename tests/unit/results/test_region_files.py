"""Regions in files, read by the rules of each format."""

import csv
import gzip
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from Bio import SeqIO

from benchmarks.reliability.crafted import HOSTILE_NAMES
from virnuc_core.plain_text import plain_name
from virnuc_core.results.region_files import REGION_COLUMNS, RegionFiles
from virnuc_core.results.regions import Region
from virnuc_core.results.result_sinks import WritingSinks
from virnuc_core.run_folder import RunFolder

# As GFF3 1.26 has it: letters that a sequence's name may hold as they are.
GFF3_NAME = re.compile(r"(?:[a-zA-Z0-9.:^*$@!+_?|-]|%[0-9A-F]{2})+")


def region(contig: int, start: int, *, score: float = 25.0) -> Region:
    return Region(
        contig=contig, start=start, end=start + 500, chunks=1, dna_alone_chunks=0, score=score, mean_p=0.75
    )


def write(folder: Path, regions: list[Region], names: list[str]) -> RunFolder:
    run = RunFolder(folder)
    with ExitStack() as stack:
        files = RegionFiles(run, WritingSinks(), stack, 0.5)
        files.extend(regions, names, [10_000] * len(names), bases_of)
    return run


def bases_of(contig: int) -> bytes:
    return b"ACGTTGCAAC"[contig:] * 1000


def bed_rows(path: Path) -> Iterator[tuple[str, int, int, str, int, str]]:
    """A reader of BED6: no header lines, six columns."""
    for line in path.read_text().splitlines():
        assert not line.startswith(("#", "track", "browser"))
        chrom, start, end, name, score, strand = line.split("\t")
        assert chrom
        assert not re.search(r"\s", chrom)
        assert 0 <= int(start) < int(end)
        assert 0 <= int(score) <= 1000
        assert strand in "+-."
        yield chrom, int(start), int(end), name, int(score), strand


def gff3_rows(path: Path) -> Iterator[tuple[str, int, int, float, dict[str, str]]]:
    """A reader of GFF3: the version first, nine columns, attributes, unique IDs, within the sequence-region."""
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


def test_the_same_regions_in_every_form(tmp_path: Path) -> None:
    regions = [region(0, 0), region(0, 5000, score=250.0), region(2, 40, score=-1.0)]
    run = write(tmp_path, regions, ["k141_1", "k141_2", "k141_3"])
    table = pd.read_csv(run.regions, sep="\t")
    assert tuple(table.columns) == REGION_COLUMNS
    assert table.values.tolist() == [
        ["k141_1", 1, 500, 500, 1, 25.0, 0.75, "likely", 0],
        ["k141_1", 5001, 5500, 500, 1, 250.0, 0.75, "confident", 0],
        ["k141_3", 41, 540, 500, 1, -1.0, 0.75, "unsure", 0],
    ]
    assert list(bed_rows(run.regions_bed)) == [
        ("k141_1", 0, 500, "region_1_likely", 250, "."),
        ("k141_1", 5000, 5500, "region_2_confident", 1000, "."),
        ("k141_3", 40, 540, "region_1_unsure", 0, "."),
    ]
    assert [row[:4] for row in gff3_rows(run.regions_gff3)] == [
        ("k141_1", 1, 500, 25.0),
        ("k141_1", 5001, 5500, 250.0),
        ("k141_3", 41, 540, -1.0),
    ]
    [_, second, _] = gff3_rows(run.regions_gff3)
    counted = {"chunks": "1", "dna_alone_chunks": "0"}
    assert second[4] == {"ID": "k141_1.region_2", **counted, "mean_p": "0.750000", "tier": "confident"}
    pd.testing.assert_frame_equal(pd.read_parquet(run.regions_parquet), table)
    with gzip.open(run.regions_fasta, "rt") as file:
        records = list(SeqIO.parse(file, "fasta"))
    assert [record.description for record in records] == [
        "k141_1:1-500 score=25.00 mean_p=0.750000 tier=likely",
        "k141_1:5001-5500 score=250.00 mean_p=0.750000 tier=confident",
        "k141_3:41-540 score=-1.00 mean_p=0.750000 tier=unsure",
    ]
    expected = [(0, 0, 500), (0, 5000, 5500), (2, 40, 540)]
    assert [str(record.seq) for record in records] == [
        bases_of(contig)[begin:end].decode() for contig, begin, end in expected
    ]


def test_no_regions(tmp_path: Path) -> None:
    run = write(tmp_path, [], ["a"])
    assert len(pd.read_csv(run.regions, sep="\t")) == 0
    assert list(bed_rows(run.regions_bed)) == []
    assert list(gff3_rows(run.regions_gff3)) == []
    assert pd.read_parquet(run.regions_parquet).columns.tolist() == list(REGION_COLUMNS)
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


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        write(tmp_path, [region(3, 0)], ["a"])
    assert list(tmp_path.iterdir()) == []
