import bz2
import gzip
import hashlib
import lzma
import os
import random
import struct
import subprocess
import sys
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


COMPRESSIONS = [gzip.compress, bgzip, zstd.compress, lzma.compress, bz2.compress]


def read(path: Path, content: bytes, alphabet: Alphabet = "dna") -> list[tuple[str, str]]:
    path.write_bytes(content)
    return [(record.name, record.sequence.decode()) for record in iter_records([path], alphabet)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "input"


def test_u_stays_u_in_proteins(path: Path) -> None:
    assert read(path, b">p\nMKuv*\n", "protein") == [("p", "MKUV*")]


@pytest.mark.parametrize("compress", [bytes, *COMPRESSIONS])
@pytest.mark.parametrize("name", ["wrong.fastq.gz", "wrong.fa"])
def test_format_and_compression_are_recognised_by_content(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    assert read(tmp_path / name, compress(FASTA)) == [("one", "ACGTACGT"), ("two", "NNRY")]
    assert read(tmp_path / name, compress(FASTQ)) == [("one", "ACGT"), ("two", "GGCA")]


# Members that may be concatenated in one file.
SEQUELS = [*((one, one) for one in COMPRESSIONS), (gzip.compress, bgzip), (bgzip, gzip.compress)]


@pytest.mark.parametrize(("first", "second"), SEQUELS)
@pytest.mark.parametrize("padding", [b"", bytes(4), bytes(200_000)])
def test_several_compressed_parts_end_to_end_are_one_file(
    path: Path, first: Callable[[bytes], bytes], second: Callable[[bytes], bytes], padding: bytes
) -> None:
    content = first(FASTA) + padding + second(b"") + second(FASTA * 300) + first(b">z\nA\n") + padding
    assert len(read(path, content)) == 2 + 600 + 1


@pytest.mark.parametrize(("first", "second"), SEQUELS)
@pytest.mark.parametrize("left_out", [1, 5, 25])
def test_a_cut_last_part_is_an_error(
    path: Path, first: Callable[[bytes], bytes], second: Callable[[bytes], bytes], left_out: int
) -> None:
    with pytest.raises(InputError, match="truncated"):
        read(path, (first(FASTA) + second(FASTA))[:-left_out])


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_a_part_of_which_only_the_first_bytes_are_there_is_an_error(
    path: Path, compress: Callable[[bytes], bytes]
) -> None:
    for size in (1, 2, 6):
        with pytest.raises(InputError, match="truncated"):
            read(path, compress(FASTA) + compress(FASTA)[:size])


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("rest", [b"rest", FASTA, zlib.compress(FASTA)])
def test_something_else_behind_compressed_data_is_an_error(
    path: Path, compress: Callable[[bytes], bytes], rest: bytes
) -> None:
    with pytest.raises(InputError, match=r"damaged: its .* data are followed by something else"):
        read(path, compress(FASTA) + rest)


def test_skippable_frames_of_zstd_are_skipped(path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"size"
    assert len(read(path, skippable + zstd.compress(FASTA) + skippable + zstd.compress(FASTA))) == 4


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_a_cut_file_is_an_error_and_never_a_shorter_result(
    path: Path, compress: Callable[[bytes], bytes], share: float
) -> None:
    letters = random.Random(1)
    content = compress(
        b"".join(b">r%d\n%s\n" % (i, letters.randbytes(50).hex().encode()) for i in range(300))
    )
    with pytest.raises(InputError, match="truncated"):
        read(path, content[: int(share * len(content)) - 1])


def test_a_bgzip_file_cut_between_two_blocks_is_truncated(path: Path) -> None:
    last_block = bgzip(b"", 1)
    cut = bgzip(FASTA * 100).removesuffix(last_block)
    for content in (
        cut,
        gzip.compress(FASTA) + cut,
        bgzip(FASTA) + cut,
        cut + gzip.compress(FASTA),
        cut + bytes(9),
    ):
        with pytest.raises(InputError, match="truncated"):
            read(path, content)
    assert len(read(path, cut + last_block)) == 200


@pytest.mark.parametrize("compress", [gzip.compress, bgzip, lzma.compress, bz2.compress])
def test_altered_bytes_are_an_error(path: Path, compress: Callable[[bytes], bytes]) -> None:
    content = bytearray(compress(b">r\n" + random.Random(1).randbytes(3000).hex().encode()))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(InputError, match=r"damaged|cannot be read"):
        read(path, bytes(content))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b">a\r\nAC\r\nGT\r\n", "ACGT"),
        (b">a\rAC\rGT\r", "ACGT"),
        (b">a\n AC\tG \n\n  T", "ACGT"),
        (b"\n\n>a\nACGT\n", "ACGT"),
        (b"\xef\xbb\xbf>a\nACGT\n", "ACGT"),
        (b"# made by hand\n>a\nAC\n# note\nGT\n", "ACGT"),
        (b">a M\xc3\xb6we\nACGT\n", "ACGT"),
        (b"@a\r\nACGT\r\n+\r\nIIII\r\n", "ACGT"),
        (b">a\nAC\xc3\xa4GT\n", "AC?GT"),
        (b">a\nACG\x1c\x1bACG\0\nACG\x7f\n", "ACG??ACG?ACG?"),
    ],
)
def test_odd_layouts(path: Path, content: bytes, expected: str) -> None:
    assert read(path, content) == [("a", expected)]


@pytest.mark.parametrize(
    ("header", "name"), [(b">", ""), (b"> ", ""), (b">\t", ""), (b">gi|1\tx", "gi|1"), (b">  two w", "two")]
)
def test_the_name_is_the_first_word(path: Path, header: bytes, name: str) -> None:
    assert read(path, header + b"\nACGT\n") == [(name, "ACGT")]


def test_records_are_numbered_over_all_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.fa", tmp_path / "b.fq"]
    paths[0].write_bytes(FASTA)
    paths[1].write_bytes(FASTQ)
    records = list(iter_records(paths, "dna"))
    assert [(record.number, record.path) for record in records] == [
        (1, str(paths[0])), (2, str(paths[0])), (3, str(paths[1])), (4, str(paths[1])),
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0), b"\n\n", b"# only a comment\n"])
def test_a_file_without_records_is_named_in_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    assert read(path, content) == []
    assert f"{path} holds no sequence record" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"LOCUS       X 1 bp\n", "neither FASTA nor FASTQ"),
        (b"PK\x03\x04", "neither FASTA nor FASTQ"),
        (gzip.compress(b"BAM\x01abc", mtime=0), "neither FASTA nor FASTQ"),
        (b"##fileformat=VCFv4.2\nchr1\t5\n", "line 2"),
        (b"@HD\tVN:1.6\nread\t0\n", "cannot be parsed"),
        (b"@r\nACGT\n+\nII\n", "cannot be parsed"),
        (b"@r\nACGT\n+\nIIII\n@s\nAC", "cannot be parsed"),
        (b">r M\xf6we\nACGT\n", "UTF-8"),
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


def test_a_file_without_permission_is_named(path: Path) -> None:
    path.write_bytes(FASTA)
    path.chmod(0)
    if not os.access(path, os.R_OK):
        with pytest.raises(InputError, match="cannot be read"):
            list(iter_records([path], "dna"))


@pytest.mark.parametrize("content", [FASTA, gzip.compress(FASTQ, mtime=0)])
def test_standard_input(content: bytes) -> None:
    code = (
        "from virnuc_core.sequences.reader import iter_records\n"
        "print(*(record.name for record in iter_records(['-'], 'dna')))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
    assert done.stdout.split() == [b"one", b"two"]


@pytest.mark.parametrize(
    ("sequence", "alphabet", "reason"),
    [
        (b"", "dna", "empty sequence"),
        (b"", "protein", "empty sequence"),
        (b"ACGTUNRYSWKMBDHV", "dna", None),
        (b"N" * 50, "dna", None),
        (b"ACGTACGTAE", "dna", None),
        (b"ACGTACGTEE", "dna", "not DNA: 2 of 10 letters"),
        (b"MKVLLPEEQ", "dna", "not DNA"),
        (b"MKVBZXUOJ*-.", "protein", None),
        (b"MKV1", "protein", "not a protein: 1 letters are not amino-acid codes, the first is '1'"),
    ],
)
def test_what_can_be_used(sequence: bytes, alphabet: Alphabet, reason: str | None) -> None:
    found = rejection_reason(sequence, alphabet)
    assert found == reason or (reason is not None and found is not None and found.startswith(reason))


def test_a_digest_is_of_the_bytes_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.fa.gz"
    path.write_bytes(gzip.compress(FASTA))
    digest = input_digest(path)
    assert (digest.name, digest.size) == ("a.fa.gz", path.stat().st_size)
    assert digest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_can_be_read_only_once_has_no_digest(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("-", pipe, "/dev/zero"):
        with pytest.raises(InputError, match="only once"):
            input_digest(path)


@pytest.mark.parametrize(
    ("content", "fits"),
    [
        (b">a\nACGT\r\n" * 50_000, True),
        (b">a\nACGT\r" * 50_000, True),
        (b"@a\nACGT\n+\nIIII\n" * 50_000, True),
        (b"\n \t" * 100_000 + b">a\nACGT\n", True),
        (b">a\n" + b"A" * 200_000, False),
        (b">a\n" + b"A\n" * 15_000, False),
        (b">a\nA\n" * 50_000 + b"A" * 200_000, False),
        (b"@a\n" + b"A" * 100_000, False),
    ],
    ids=["FASTA", "FASTA of a Mac", "FASTQ", "blanks", "long", "many lines", "late", "FASTQ line"],
)
def test_a_record_that_does_not_fit_into_memory_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, fits: bool
) -> None:
    monkeypatch.setattr("virnuc_core.sequences.reader.memory_limit", lambda: 2_200_000)
    if fits:
        assert len(read(path, gzip.compress(content))) == content.count(b"a\n") + content.count(b"a\r")
    else:
        with pytest.raises(
            InputError, match=r"input holds a record of more than [\d,]+ bytes, which does not fit"
        ):
            read(path, gzip.compress(content))
