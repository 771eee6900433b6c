"""Records and their classes, from files, tables and GenBank."""

import gzip
import random
from collections import Counter
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
)

Region = tuple[str, int, int, Mapping[str, str]]


def dna(seed: object, length: int = 400) -> str:
    return "".join(random.Random(str(seed)).choices("ACGT", k=length))


def made_record(name: str, lineage: Sequence[str], regions: Sequence[Region] = ()) -> SeqRecord:
    record = SeqRecord(Seq(dna(name, 600)), id=f"{name}.1", name=name, description="made")
    record.annotations = {"molecule_type": "DNA", "taxonomy": list(lineage), "organism": "made"}
    record.features = [
        SeqFeature(FeatureLocation(begin, end), type=kind, qualifiers={k: [v] for k, v in said.items()})
        for kind, begin, end, said in [("source", 0, 600, {"organism": "made"}), *regions]
    ]
    return record


def write_genbank(path: Path, *records: SeqRecord) -> Path:
    SeqIO.write(records, path, "genbank")
    return path


def write_fasta(path: Path, **records: str) -> str:
    path.write_text("".join(f">{name} made\n{sequence}\n" for name, sequence in records.items()))
    return str(path)


def converted(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    classes, _ = convert_genbank(str(path), fasta := path.with_suffix(".fa"))
    sequences = {record.name: record.sequence.decode() for record in iter_records([fasta], "dna")}
    return sequences, classes


def test_the_class_is_in_the_lineage(tmp_path: Path) -> None:
    records = [
        made_record("PHAGE", ["Viruses", "Duplodnaviria"]),
        made_record("ECOLI", ["Bacteria", "Pseudomonadota"]),
        made_record("HUMAN", ["cellular organisms", "Eukaryota", "Metazoa"]),
        made_record("VECTOR", ["other sequences", "artificial sequences"]),
        made_record("NOTHING", []),
    ]
    path = write_genbank(tmp_path / "x.gb", *records)
    _, counts = convert_genbank(str(path), tmp_path / "y.fa")
    assert counts == Counter(records=5, left_out=2, prophages=0)
    compressed = tmp_path / "compressed"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert is_genbank(str(compressed))
    sequences, classes = converted(compressed)
    assert classes == {"PHAGE.1": "viral", "ECOLI.1": "bacteria", "HUMAN.1": "eukaryota"}
    assert sequences == {f"{record.name}.1": str(record.seq) for record in records[:3]}
    twice = write_genbank(tmp_path / "twice.gb", made_record("PHAGE", ["Bacteria"]), records[0])
    with pytest.raises(InputError, match=r"PHAGE\.1 occurs twice"):
        converted(twice)


def test_prophages_are_cut_out_of_cellular_records_alone(tmp_path: Path) -> None:
    regions: list[Region] = [
        ("mobile_element", 100, 200, {"mobile_element_type": "other: prophage Lambda-like"}),
        ("misc_feature", 180, 250, {"note": "Provirus; predicted"}),
        ("CDS", 300, 330, {"product": "prophage tail protein"}),
        ("misc_feature", 400, 420, {"note": "attachment site"}),
        ("source", 500, 520, {"note": "prophage Lambda"}),
        ("source", 590, 600, {"proviral": ""}),
    ]
    host, virus = made_record("HOST", ["Bacteria"], regions), made_record("VIRUS", ["Viruses"], regions)
    host.features[0].qualifiers["note"] = ["derivative of K-12, cured of its prophage"]
    provirus = made_record("PROVIRUS", ["Eukaryota"])
    provirus.features[0].qualifiers["proviral"] = [""]
    sequences, _ = converted(write_genbank(tmp_path / "x.gb", host, virus, provirus))
    kept = {f"HOST.1:{begin + 1}-{end}": (begin, end) for begin, end in ((0, 100), (250, 500), (520, 590))}
    assert sequences == {
        **{name: str(host.seq)[begin:end] for name, (begin, end) in kept.items()},
        "VIRUS.1": str(virus.seq),
    }


@pytest.mark.parametrize(
    ("cut_at", "end", "message"),
    [
        ("DEFINITION", "", "Download it again"),
        ("ORIGIN", "", "Download it (again|with its sequence)"),
        ("       61 ", "", "Download it again"),
        ("ORIGIN", "CONTIG      join(ABC.1:1..600)\n//\n", r"CHROMOSOME\.1 of .* has no sequence"),
        ("LOCUS", ">a\nACGT\n", "is not GenBank"),
    ],
)
def test_files_that_are_no_whole_genbank_are_refused(
    tmp_path: Path, cut_at: str, end: str, message: str
) -> None:
    path = write_genbank(tmp_path / "damaged.gb", made_record("CHROMOSOME", ["Bacteria"]))
    content = path.read_text()
    path.write_text(content[: content.index(cut_at)] + end)
    with pytest.raises(InputError, match=message) as caught:
        convert_genbank(str(path), tmp_path / "y.fa")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "y.fa").exists()


def records_of(files: LabelledFiles, scratch: Path, groups: dict[str, str] | None = None) -> RecordTable:
    return read_records(open_sources(files, scratch)[0], groups or {}, kinship=True)


def test_every_way_to_say_what_a_record_is(tmp_path: Path) -> None:
    table = tmp_path / "labels.tsv"
    table.write_text("class,seq_name,length\nVirus,one,1\nplant,two,2\nunused,three,3\n")
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


def test_the_labels_of_the_examples_are_read(tmp_path: Path) -> None:
    examples = Path(__file__).parents[3] / "examples"
    files = LabelledFiles(labelled=(str(examples / "contigs.fa.gz"),), labels=str(examples / "labels.tsv"))
    found = records_of(files, tmp_path)
    assert (len(found.names), found.is_viral.sum(), found.class_names) == (18, 5, ("viral", "other"))


def test_groups_of_a_person_and_of_likeness_are_joined(tmp_path: Path) -> None:
    viral = write_fasta(tmp_path / "v.fa", a=dna(1), b=dna(1)[:300], c=dna(2), d=dna(3))
    files = LabelledFiles(viral=(viral,), other=(write_fasta(tmp_path / "o.fa", x=dna(4)),))
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
        (b"a\tviral\n", r"lacks the columns seq_name \(or contig, record, id\) and label or class"),
        (b"record\tclass\na\tviral\n", r"labels\.tsv lacks .* \(or contig, record, id\)"),
        (b"seq_name\tclass\na\tviral\na\tplant\n", "two values of class: viral and plant"),
        (b"seq_name\tlabel\tclass\na\t\tviral\n", "line 2: the seq_name or its label is missing"),
        (b"seq_name,label\nb,viral\n", "record a .* has no label"),
        (b"\xff", "cannot be read as a table"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    table = tmp_path / "labels.tsv"
    table.write_bytes(content)
    files = LabelledFiles(labelled=(write_fasta(tmp_path / "l.fa", a=dna(1)),), labels=str(table))
    with pytest.raises(InputError, match=message):
        records_of(files, tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (LabelledFiles(), "no sequences given"),
        (LabelledFiles(labelled=("a.fa",)), "no labels for"),
        (LabelledFiles(viral=("a.fa",), labels="a.fa"), "--labels applies to files"),
        (LabelledFiles(viral=("a.fa",), other=("a.fa",)), "is given twice"),
        (LabelledFiles(viral=("-",)), "standard input"),
    ],
)
def test_files_that_do_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: LabelledFiles, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_fasta(tmp_path / "a.fa", a=dna(1))
    with pytest.raises(UsageError, match=message):
        open_sources(files, tmp_path)
