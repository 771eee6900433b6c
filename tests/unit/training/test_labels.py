"""Records and their classes, from files, tables and GenBank."""

import gzip
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqFeature import FeatureLocation, SeqFeature
from Bio.SeqRecord import SeqRecord

from virnuc_core.errors import InputError, UsageError
from virnuc_core.sequences.reader import iter_records
from virnuc_core.training.labels import (
    LabelledFiles,
    RecordTable,
    convert_genbank,
    is_genbank,
    open_sources,
    read_records,
    read_table,
)

Region = tuple[str, int, int, Mapping[str, str]]


def made_record(
    name: str, lineage: Sequence[str], regions: Sequence[Region] = (), length: int = 600
) -> SeqRecord:
    sequence = "".join(random.Random(name).choices("ACGT", k=length))
    record = SeqRecord(Seq(sequence), id=f"{name}.1", name=name, description="made")
    record.annotations = {"molecule_type": "DNA", "taxonomy": list(lineage), "organism": "made"}
    record.features = [
        SeqFeature(FeatureLocation(begin, end), type=kind, qualifiers={k: [v] for k, v in said.items()})
        for kind, begin, end, said in [("source", 0, length, {"organism": "made"}), *regions]
    ]
    return record


def write_genbank(path: Path, *records: SeqRecord) -> Path:
    SeqIO.write(records, path, "genbank")
    return path


def converted(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    fasta, table = path.with_suffix(".fa"), path.with_suffix(".tsv")
    convert_genbank(str(path), fasta, table)
    sequences = {record.name: record.sequence.decode() for record in iter_records([fasta], "dna")}
    return sequences, read_table(str(table), "class")


def test_the_class_is_in_the_lineage(tmp_path: Path) -> None:
    records = [
        made_record("PHAGE", ["Viruses", "Duplodnaviria"]),
        made_record("ECOLI", ["Bacteria", "Pseudomonadota"]),
        made_record("HUMAN", ["cellular organisms", "Eukaryota", "Metazoa"]),
        made_record("VECTOR", ["other sequences", "artificial sequences"]),
        made_record("NOTHING", []),
    ]
    path = write_genbank(tmp_path / "x.gb", *records)
    sequences, classes = converted(path)
    assert classes == {"PHAGE.1": "viral", "ECOLI.1": "bacteria", "HUMAN.1": "eukaryota"}
    assert sequences == {f"{record.name}.1": str(record.seq) for record in records[:3]}
    counts = convert_genbank(str(path), tmp_path / "y.fa", tmp_path / "y.tsv")
    assert (counts.records, counts.left_out, counts.prophages) == (5, 2, 0)


def test_prophages_are_cut_out_of_cellular_records_alone(tmp_path: Path) -> None:
    regions: list[Region] = [
        ("mobile_element", 100, 200, {"mobile_element_type": "other: prophage Lambda-like"}),
        ("misc_feature", 180, 250, {"note": "Provirus; predicted"}),
        ("source", 590, 600, {"proviral": ""}),
        ("CDS", 300, 330, {"product": "prophage tail protein"}),
        ("misc_feature", 400, 420, {"note": "attachment site"}),
    ]
    path = write_genbank(
        tmp_path / "x.gb",
        made_record("HOST", ["Bacteria"], regions),
        made_record("VIRUS", ["Viruses"], regions),
    )
    sequences, _ = converted(path)
    whole = str(made_record("HOST", []).seq)
    assert sequences["HOST.1:1-100"] == whole[:100]
    assert sequences["HOST.1:251-590"] == whole[250:590]
    assert len(sequences["VIRUS.1"]) == 600
    assert len(sequences) == 3


def test_the_note_of_a_source_marks_a_region_only_where_it_is_one(tmp_path: Path) -> None:
    host = made_record("HOST", ["Bacteria"], [("source", 100, 200, {"note": "prophage Lambda"})])
    host.features[0].qualifiers["note"] = ["derivative of K-12, cured of its prophage"]
    provirus = made_record("PROVIRUS", ["Eukaryota"])
    provirus.features[0].qualifiers["proviral"] = [""]
    sequences, _ = converted(write_genbank(tmp_path / "x.gb", host, provirus))
    assert sequences == {"HOST.1:1-100": str(host.seq)[:100], "HOST.1:201-600": str(host.seq)[200:]}


def test_compressed_files_are_recognised_by_content(tmp_path: Path) -> None:
    plain = write_genbank(tmp_path / "x.txt", made_record("PHAGE", ["Viruses"]))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    fasta = tmp_path / "x.fa"
    fasta.write_text(">a\nACGT\n")
    assert [is_genbank(str(path)) for path in (plain, packed, fasta)] == [True, True, False]
    assert converted(packed)[1] == {"PHAGE.1": "viral"}


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    content = write_genbank(tmp_path / "x.gb", made_record("PHAGE", ["Viruses"])).read_text()
    damaged = tmp_path / "damaged.gb"
    damaged.write_text(content[: int(share * len(content))])
    with pytest.raises(InputError, match=r"damaged\.gb .*Download it (again|with its sequence)"):
        convert_genbank(str(damaged), tmp_path / "y.fa", tmp_path / "y.tsv")
    assert not (tmp_path / "y.fa").exists()


def test_a_record_without_its_sequence_is_named(tmp_path: Path) -> None:
    path = write_genbank(tmp_path / "x.gb", made_record("CHROMOSOME", ["Bacteria"]))
    lines = path.read_text().splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith("ORIGIN"))
    path.write_text("".join([*lines[:begin], "CONTIG      join(ABC.1:1..600)\n", "//\n"]))
    with pytest.raises(InputError, match=r"CHROMOSOME\.1 .* has no sequence"):
        convert_genbank(str(path), tmp_path / "y.fa", tmp_path / "y.tsv")


def test_what_is_not_genbank_is_refused(tmp_path: Path) -> None:
    fasta = tmp_path / "x.fa"
    fasta.write_text(">a\nACGT\n")
    with pytest.raises(InputError, match="is not GenBank"):
        convert_genbank(str(fasta), tmp_path / "y.fa", tmp_path / "y.tsv")


def write_fasta(path: Path, **records: str) -> str:
    path.write_text("".join(f">{name} made\n{sequence}\n" for name, sequence in records.items()))
    return str(path)


def dna(seed: int, length: int = 400) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=length))


def records_of(files: LabelledFiles, scratch: Path, groups: dict[str, str] | None = None) -> RecordTable:
    return read_records(open_sources(files, scratch)[0], groups, kinship=True)


def test_every_way_to_say_what_a_record_is(tmp_path: Path) -> None:
    table = tmp_path / "labels.tsv"
    table.write_text("class\tid\tlength\nVirus\tone\t1\nplant\ttwo\t2\nunused\tthree\t3\n")
    files = LabelledFiles(
        viral=(write_fasta(tmp_path / "v.fa", a=dna(1)),),
        other=(write_fasta(tmp_path / "o.fa", b=dna(2)),),
        genbank=(str(write_genbank(tmp_path / "g.gb", made_record("G", ["Bacteria"]))),),
        labelled=(
            write_fasta(tmp_path / "l.fa", one=dna(3), two=dna(4)),
            str(write_genbank(tmp_path / "h", made_record("H", ["Viruses"]))),
        ),
        labels=str(table),
    )
    found = records_of(files, tmp_path / "scratch")
    assert found.names == ("a", "b", "G.1", "one", "two", "H.1")
    classes = [found.class_names[number] for number in found.classes]
    assert classes == ["viral", "other", "bacteria", "viral", "plant", "viral"]
    assert found.is_viral.tolist() == [True, False, False, True, False, True]
    assert found.lengths.tolist() == [400, 400, 600, 400, 400, 600]
    assert len(np.unique(found.groups)) == 6


def test_groups_of_a_person_and_of_likeness_are_joined(tmp_path: Path) -> None:
    files = LabelledFiles(
        viral=(write_fasta(tmp_path / "v.fa", a=dna(1), b=dna(1)[:300], c=dna(2), d=dna(3)),),
        other=(write_fasta(tmp_path / "o.fa", x=dna(4)),),
    )
    groups = records_of(files, tmp_path, {"b": "mine", "c": "mine"}).groups
    assert groups[0] == groups[1] == groups[2]
    assert len(np.unique(groups)) == 3
    with pytest.raises(InputError, match="--groups"):
        records_of(files, tmp_path, {"nobody": "mine"})


def test_the_same_sequence_in_both_classes_is_refused(tmp_path: Path) -> None:
    reverse = dna(1).translate(str.maketrans("ACGT", "TGCA"))[::-1]
    files = LabelledFiles(
        viral=(write_fasta(tmp_path / "v.fa", phage=dna(1), empty=""),),
        other=(write_fasta(tmp_path / "o.fa", empty="", prophage=reverse),),
    )
    with pytest.raises(InputError, match=r"phage \(viral\) and prophage \(other"):
        records_of(files, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tviral\n", "no columns record and class"),
        ("record\tclass\na\tviral\na\tplant\n", "two values of class: viral and plant"),
        ("record\tclass\na\n", "line 2: the record or its class is missing"),
        ("record\tclass\nb\tviral\n", "record a .* has no label"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    table = tmp_path / "labels.tsv"
    table.write_text(content)
    files = LabelledFiles(labelled=(write_fasta(tmp_path / "l.fa", a=dna(1)),), labels=str(table))
    with pytest.raises(InputError, match=message):
        records_of(files, tmp_path)
    with pytest.raises(InputError, match="cannot be read as a table"):
        read_table(str(tmp_path), "class")


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    fasta = write_fasta(tmp_path / "v.fa", a=dna(1))
    for files, message in (
        (LabelledFiles(), "no sequences are given"),
        (LabelledFiles(labelled=(fasta,)), "nothing says which records"),
        (LabelledFiles(viral=(fasta,), labels=fasta), "--labels is for files"),
        (LabelledFiles(viral=(fasta,), other=(fasta,)), "is given twice"),
        (LabelledFiles(viral=("-",)), "standard input"),
    ):
        with pytest.raises(UsageError, match=message):
            open_sources(files, tmp_path)
