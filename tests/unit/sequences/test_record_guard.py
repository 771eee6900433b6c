"""A record that does not fit into memory is refused before it is read, and others pass unchanged."""

import io
import lzma
from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.sequences.reader import input_digest, iter_records
from virnuc_core.sequences.record_guard import FASTA_RECORD, FASTQ_LINE, RecordGuard, RecordShape

COSTLY = RecordShape(mark=b">", begins=(b"\n>", b"\r>"), byte_cost=1 << 30, line_cost=0)


def through(data: bytes, shape: RecordShape) -> bytes:
    by_blocks = RecordGuard(io.BufferedReader(io.BytesIO(data)), shape, "in.fa")
    read = b"".join(iter(by_blocks.read1, b""))
    filling = RecordGuard(io.BufferedReader(io.BytesIO(data)), shape, "in.fa")
    filled = b"".join(iter(lambda: filling.read(1000), b""))
    assert filled == read
    return read


@pytest.mark.parametrize("shape", [FASTA_RECORD, FASTQ_LINE])
@pytest.mark.parametrize("size", [0, 1, 131072, 131073, 400_000])
def test_bytes_pass_unchanged(shape: RecordShape, size: int) -> None:
    data = (b">a\nACGT\r\n" * (size // 9 + 1))[:size]
    assert through(data, shape) == data


def test_a_large_record_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"in\.fa holds a record of more than [\d,]+ bytes, which does not fit"
    ):
        through(b">a\n" + b"A" * 1000, COSTLY)


def test_lines_count_too() -> None:
    lines = RecordShape(mark=b">", begins=(b"\n>",), byte_cost=0, line_cost=1 << 28)
    assert through(b">a\nA\n>b\n", lines)
    with pytest.raises(InputError, match="does not fit"):
        through(b">a\n" + b"A\n" * 100_000, lines)


def test_many_small_records_are_no_large_one() -> None:
    small = RecordShape(mark=b">", begins=(b"\n>",), byte_cost=1 << 12, line_cost=0)
    data = b">a\nACGT\n" * 200_000
    assert through(data, small) == data


def test_blanks_before_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "in.fa.xz"
    path.write_bytes(lzma.compress(b"\n \t" * 3_000_000 + b">a\nACGT\n"))
    assert [(r.name, r.sequence) for r in iter_records([path], "dna")] == [("a", b"ACGT")]


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(InputError, match="can be read only once"):
        input_digest("/dev/zero")


@pytest.mark.parametrize("name", ["a\0b.fa", "\ud800.fa", "x" * 5000])
def test_impossible_paths(name: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        list(iter_records([name], "dna"))
    with pytest.raises(InputError, match="cannot be read"):
        input_digest(name)
