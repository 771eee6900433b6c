"""Viral sequences in every format, read by the rules of each."""

import re
from urllib.parse import unquote

import pytest

from tests.made_hostile import HOSTILE_NAMES
from virnuc_core.plain_text import plain_name
from virnuc_core.results.virus_files import (
    ViralSequence,
    bed_lines,
    fasta_records,
    gff3_lines,
    summary_table,
    terminal_repeats,
)

# A BED reader takes some lines for headers; GFF3 1.26 says which letters a name may hold as they are.
BED_NAME = re.compile(r"(?!#|track|browser)\S+")
GFF3_NAME = re.compile(r"(?:[a-zA-Z0-9.:^*$@!+_?|-]|%[0-9A-F]{2})+")
REPEAT, MIDDLE = b"ACGGTTCAATGCCGATAGTC", b"GGCATTTCGACCCTAGA" * 9
INVERTED = b"GACTATCGGCATTGAACCGT"


@pytest.mark.parametrize(
    ("bases", "topology"),
    [
        (REPEAT + MIDDLE + REPEAT, "DTR"),
        (REPEAT + b"TTAGC" + MIDDLE + REPEAT + b"TTAGC", "DTR"),
        (REPEAT + REPEAT, "DTR"),
        (REPEAT[:19] + b"A" + MIDDLE + REPEAT[:19], "linear"),
        (REPEAT + MIDDLE + REPEAT + b"A", "linear"),  # it does not reach the end
        (REPEAT + MIDDLE + INVERTED, "ITR"),
        (REPEAT[:19] + b"C" + MIDDLE + INVERTED, "ITR"),
        (REPEAT[:19] + b"T" + MIDDLE + INVERTED, "linear"),
        (b"N" + REPEAT[1:] + MIDDLE + b"N" + REPEAT[1:], "linear"),
        (REPEAT + REPEAT[:19], "linear"),  # the repeats overlap
        (REPEAT + MIDDLE, "linear"),
        (b"", "linear"),
    ],
)
def test_terminal_repeats(bases: bytes, topology: str) -> None:
    assert terminal_repeats(bases) == topology


def viral(contig: str, start: int = 0, end: int | None = None, *, bases: bytes = MIDDLE) -> ViralSequence:
    """A provirus with coordinates, else a contig."""
    stop = len(bases) if end is None else end
    return ViralSequence(
        contig=contig, contig_length=len(bases), start=start, end=stop, bases=bases[start:stop], is_provirus=end is not None,
        score=0.98765432, fdr=0.01, virus_class="phage", confidence="confident",
    )  # fmt: skip


def test_contigs_and_proviruses_in_every_format() -> None:
    found = [
        viral("k141_1", bases=REPEAT + MIDDLE + REPEAT),
        viral("k141_2", 10, 60),
        viral("k141_2", 90, 120),
    ]
    parts = ("k141_2|provirus_11_60", "k141_2|provirus_91_120")
    facts = {"virus_score": 0.98765432, "fdr": 0.01, "class": "phage", "confidence": "confident"}
    assert summary_table(found).to_pylist() == [
        {"seq_name": "k141_1", "length": 193, "topology": "DTR", "coordinates": None, **facts},
        {"seq_name": parts[0], "length": 50, "topology": "provirus", "coordinates": "11-60", **facts},
        {"seq_name": parts[1], "length": 30, "topology": "provirus", "coordinates": "91-120", **facts},
    ]
    assert bed_lines(found).decode().splitlines() == [
        "k141_1\t0\t193\tk141_1\t988\t.",
        f"k141_2\t10\t60\t{parts[0]}\t988\t.",
        f"k141_2\t90\t120\t{parts[1]}\t988\t.",
    ]
    made_by, rest = "\tvirnuc\tviral_sequence\t", "\t0.987654\t.\t.\tID="
    assert gff3_lines(found).decode().splitlines() == [
        "##sequence-region k141_1 1 193",
        f"k141_1{made_by}1\t193{rest}k141_1;topology=DTR;confidence=confident",
        "##sequence-region k141_2 1 153",
        f"k141_2{made_by}11\t60{rest}{parts[0]};topology=provirus;confidence=confident",
        f"k141_2{made_by}91\t120{rest}{parts[1]};topology=provirus;confidence=confident",
    ]
    sequences = (REPEAT + MIDDLE + REPEAT, MIDDLE[10:60], MIDDLE[90:120])
    records = b"".join(fasta_records(found)).decode().split(">")[1:]
    assert [record.split("\n", 1)[0] for record in records] == ["k141_1", *parts]
    assert [record.split("\n", 1)[1].replace("\n", "").encode() for record in records] == list(sequences)


@pytest.mark.parametrize(
    "names",
    [
        ["#1", "track", "browser_x", "trackless", "gi|1|ref|NC_1.1|", "a;b=c&d,e", "50%", "~", ">x", "ä/b"],
        [plain_name(name) for name in HOSTILE_NAMES if name.split()],
    ],
    ids=["odd", "hostile"],
)
def test_odd_names_are_valid_in_every_format(names: list[str]) -> None:
    found = [one for name in names for one in (viral(name), viral(name, 10, 60))]
    bed, gff3 = (
        [line.split("\t") for line in lines(found).decode().split("\n")[:-1]]
        for lines in (bed_lines, gff3_lines)
    )
    twice = [name for name in names for _ in range(2)]
    assert [unquote(row[0]) for row in bed] == [unquote(name) for name in twice]
    assert all(len(row) == 6 and BED_NAME.fullmatch(row[0]) for row in bed)
    features = [row for row in gff3 if not row[0].startswith("##")]
    assert [unquote(row[0]) for row in features] == twice
    assert all(len(row) == 9 and GFF3_NAME.fullmatch(row[0]) for row in features)
    identifiers = [row[8].split(";")[0].removeprefix("ID=") for row in features]
    assert [unquote(name) for name in identifiers] == [one.name for one in found]
    assert all(GFF3_NAME.fullmatch(name) for name in identifiers)
    headers = [record.split(b"\n")[0].decode() for record in fasta_records(found)]
    assert headers == [f">{one.name}" for one in found]
