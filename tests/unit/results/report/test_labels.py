"""Tables of labels as people have them."""

from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.results.report.labels import MAX_CLASSES, read_labels


def test_names_are_written_as_in_the_tables(tmp_path: Path) -> None:
    table = tmp_path / "labels.tsv"
    table.write_bytes(
        "\ufeffcontig\tlabel\torganism\r\n# mine\n\na\tvirus\tx\n=1+1 long header\tbacteria\nb\t=cmd\r\na\tvirus\n".encode()
    )
    assert read_labels(table) == {"a": "virus", "%3D1+1": "bacteria", "b": "%3Dcmd"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a virus\n", "line 1: 'a virus' is not a contig, a tab"),
        (b"a\tvirus\nb\t\n", "line 2"),
        (b"a\tvirus\na\tother\n", "one class"),
        (b"", "labels nothing"),
        (b"contig\tclass\n", "labels nothing"),
        (b"a\t\xff\n", "not UTF-8"),
        (
            "".join(f"c{i}\tclass {i}\n" for i in range(MAX_CLASSES + 1)).encode(),
            "is the second column the class",
        ),
    ],
)
def test_what_cannot_be_used_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    table = tmp_path / "labels.tsv"
    table.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_labels(table)


def test_the_labels_of_the_examples(examples_dir: Path) -> None:
    labels = read_labels(examples_dir / "labels.tsv")
    assert len(labels) == 18
    assert set(labels.values()) == {"virus", "other"}
