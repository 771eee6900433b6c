import random
from pathlib import Path

import numpy as np
import pytest

from tests.unit.training.test_genbank import made_record, write_genbank
from virnuc_core.errors import InputError, UsageError
from virnuc_core.training.labels import LabelledFiles, RecordTable, open_sources, read_records, read_table


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
