"""FASTA and FASTQ in any layout and compression, and files that are cut, damaged or of another kind."""

import bz2
import gzip
import hashlib
import lzma
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from virnuc_core.errors import InputError
from virnuc_core.sequences.reader import input_digest, iter_records, rejection_reason
from virnuc_core.specs import Alphabet

FASTA = b">one first record\nACGT\nacgu\n\n>two\nNNRY\n"
FASTQ = b"@one first read\nACGT\n+\nIIII\n@two\nGGCA\n+\nIIII\n"
Compress = Callable[[bytes], bytes]


def bgzip(data: bytes, block: int = 1000) -> bytes:
    """One gzip member per block, each marked BC, and an empty one at the end."""
    blocks = [data[begin : begin + block] for begin in range(0, len(data), block)] + [b""]
    parts = []
    for part in blocks:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = deflate.compress(part) + deflate.flush()
        extra = struct.pack("<HccHH", 6, b"B", b"C", 2, len(body) + 25)
        parts.append(b"\x1f\x8b\x08\x04" + bytes(4) + b"\x00\xff" + extra + body)
        parts.append(struct.pack("<II", zlib.crc32(part), len(part)))
    return b"".join(parts)


COMPRESSIONS: list[Compress] = [gzip.compress, bgzip, zstd.compress, lzma.compress, bz2.compress]
# Members that may be concatenated in one file.
SEQUELS = [*((one, one) for one in COMPRESSIONS), (gzip.compress, bgzip), (bgzip, gzip.compress)]


def read(path: Path, content: bytes) -> list[tuple[str, str]]:
    path.write_bytes(content)
    return [(record.name, record.sequence.decode()) for record in iter_records([path], "dna")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "input"


@pytest.mark.parametrize("compress", [bytes, *COMPRESSIONS])
@pytest.mark.parametrize("name", ["wrong.fastq.gz", "wrong.fa"])
def test_format_and_compression_are_recognised_by_content(
    tmp_path: Path, compress: Compress, name: str
) -> None:
    assert read(tmp_path / name, compress(FASTA)) == [("one", "ACGTACGT"), ("two", "NNRY")]
    assert read(tmp_path / name, compress(FASTQ)) == [("one", "ACGT"), ("two", "GGCA")]


@pytest.mark.parametrize(("first", "second"), SEQUELS)
@pytest.mark.parametrize("padding", [b"", bytes(4), bytes(200_000)])
def test_several_compressed_parts_end_to_end_are_one_file(
    path: Path, first: Compress, second: Compress, padding: bytes
) -> None:
    content = first(FASTA) + padding + second(b"") + second(FASTA * 300) + first(b">z\nA\n") + padding
    assert len(read(path, content)) == 2 + 600 + 1


def test_skippable_frames_of_zstd_are_skipped(path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"size"
    assert len(read(path, skippable + zstd.compress(FASTA) + skippable + zstd.compress(FASTA))) == 4


@pytest.mark.parametrize(("first", "second"), SEQUELS)
def test_a_cut_file_is_an_error_and_never_a_shorter_result(
    path: Path, first: Compress, second: Compress
) -> None:
    letters = random.Random(1)
    sequences = [letters.randbytes(50).hex().encode() for _ in range(300)]
    long = first(b"".join(b">r%d\n%s\n" % numbered for numbered in enumerate(sequences)))
    both, begin = first(FASTA) + second(FASTA), len(first(FASTA))
    for cut in (
        *(long[: int(share * len(long)) - 1] for share in (0.1, 0.5, 0.9, 1)),
        *(both[:-left_out] for left_out in (1, 5, 25)),
        *(both[: begin + size] for size in (1, 2, 6)),
    ):
        with pytest.raises(InputError, match="truncated"):
            read(path, cut)


def test_a_bgzip_file_cut_between_two_blocks_is_truncated(path: Path) -> None:
    last_block = bgzip(b"", 1)
    cut = bgzip(FASTA * 100).removesuffix(last_block)
    other = gzip.compress(FASTA)
    for content in (cut, other + cut, bgzip(FASTA) + cut, cut + other, cut + bytes(9)):
        with pytest.raises(InputError, match="truncated"):
            read(path, content)
    assert len(read(path, cut + last_block)) == 200


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("rest", [b"rest", FASTA, zlib.compress(FASTA)])
def test_something_else_behind_compressed_data_is_an_error(
    path: Path, compress: Compress, rest: bytes
) -> None:
    with pytest.raises(InputError, match=r"damaged: its .* data are followed by other bytes"):
        read(path, compress(FASTA) + rest)


@pytest.mark.parametrize("compress", [gzip.compress, bgzip, lzma.compress, bz2.compress])
def test_altered_bytes_are_an_error(path: Path, compress: Compress) -> None:
    content = bytearray(compress(b">r\n" + random.Random(1).randbytes(3000).hex().encode()))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(InputError, match=r"damaged|cannot be read"):
        read(path, bytes(content))


# Other layouts are in test_hard_inputs.py.
@pytest.mark.parametrize(
    ("content", "name", "sequence"),
    [
        (b"\n\n>a\nACGT\n", "a", "ACGT"),
        (b"# made by hand\n>a\nAC\n# note\nGT\n", "a", "ACGT"),
        (b">a M\xc3\xb6we\nACGT\n", "a", "ACGT"),
        (b"@a\r\nACGT\r\n+\r\nIIII\r\n", "a", "ACGT"),
        (b">a\nAC\xc3\xa4GT\n", "a", "AC?GT"),
        (b">a\nACG\x1c\x1bACG\0\nACG\x7f\n", "a", "ACG??ACG?ACG?"),
        (b"> \nACGT\n", "", "ACGT"),
        (b">\t\nACGT\n", "", "ACGT"),
        (b">gi|1\tx\nACGT\n", "gi|1", "ACGT"),
        (b">  two w\nACGT\n", "two", "ACGT"),
        (b">c.76A>G\nACGT\n", "c.76A>G", "ACGT"),
    ],
)
def test_odd_layouts(path: Path, content: bytes, name: str, sequence: str) -> None:
    assert read(path, content) == [(name, sequence)]


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0), b"\n\n", b"# only a comment\n"])
def test_a_file_without_records_is_named_in_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    assert read(path, content) == []
    assert f"{path} contains no sequence record" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"LOCUS       X 1 bp\n", "neither FASTA nor FASTQ"),
        (gzip.compress(b"BAM\x01abc", mtime=0), "neither FASTA nor FASTQ"),
        (b"##fileformat=VCFv4.2\nchr1\t5\n", "neither FASTA nor FASTQ"),
        (b"@HD\tVN:1.6\nread\t0\n", "cannot be parsed"),
        (b"@r\nACGT\n+\nII\n", "cannot be parsed"),
        (b"@r\nACGT\n+\nIIII\n@s\nAC", "cannot be parsed"),
        (b">r M\xf6we\nACGT\n", "UTF-8"),
        (b">a x\nACGT>b\nGG\n", "after 4 letters of the sequence of 'a x' comes '>b', where another record"),
        (b"# made>a\nACGT\n>b\nGG\n", "follows its comments"),
    ],
)
def test_other_content_is_one_clear_error(path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(path, content)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.fa", "does not exist"),
        (".", "is a folder"),
        *((name, "cannot be read") for name in ("a\0b.fa", "\ud800.fa", "x" * 5000)),
    ],
)
def test_impossible_paths(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(iter_records([f"{tmp_path}/{name}"], "dna"))
    with pytest.raises(InputError, match=message):
        input_digest(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("sequence", "alphabet", "reason"),
    [
        (b"", "dna", "empty sequence"),
        (b"", "protein", "empty sequence"),
        (b"ACGTUNRYSWKMBDHV", "dna", None),
        (b"N" * 50, "dna", None),
        (b"ACGTACGTAE", "dna", None),
        (b"ACGTACGTEE", "dna", "not DNA: 2 of 10 letters"),
        (b"MKVBZXUOJ*-.", "protein", None),
        (b"MKV1", "protein", "not a protein: 1 letters are not amino-acid codes, the first '1'"),
    ],
)
def test_what_can_be_used(sequence: bytes, alphabet: Alphabet, reason: str | None) -> None:
    found = rejection_reason(sequence, alphabet)
    assert found == reason or (reason is not None and found is not None and found.startswith(reason))


def test_a_digest_is_of_the_bytes_as_stored(path: Path) -> None:
    path.write_bytes(gzip.compress(FASTA))
    digest = input_digest(path)
    assert (digest.name, digest.size) == ("input", path.stat().st_size)
    assert digest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_can_be_read_only_once_has_no_digest(path: Path) -> None:
    os.mkfifo(path)
    for once in ("-", path, "/dev/zero"):
        with pytest.raises(InputError, match="only once"):
            input_digest(once)


@pytest.mark.parametrize(
    ("content", "num_records"),
    [
        (b">a\nACGT\r\n" * 50_000, 50_000),
        (b">a\nACGT\r" * 50_000, 50_000),
        (b"@a\nACGT\n+\nIIII\n" * 50_000, 50_000),
        (b"\n \t" * 100_000 + b">a\nACGT\n", 1),
        (b">a\n" + b"A" * 200_000, None),
        (b">a\n" + b"A\n" * 100_000, None),
        (b">a\nA\n" * 50_000 + b"A" * 200_000, None),
        (b"@a\n" + b"A" * 100_000, None),
    ],
    ids=["FASTA", "FASTA of a Mac", "FASTQ", "blanks", "long", "many lines", "late", "FASTQ line"],
)
def test_a_record_that_does_not_fit_into_memory_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, num_records: int | None
) -> None:
    monkeypatch.setattr("virnuc_core.sequences.reader.memory_limit", lambda: 2_200_000)
    if num_records is not None:
        assert len(read(path, gzip.compress(content))) == num_records
    else:
        message = r"input contains a record of more than [\d,]+ bytes, which does not fit"
        with pytest.raises(InputError, match=message):
            read(path, gzip.compress(content))
