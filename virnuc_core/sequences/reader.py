"""Reads records of FASTA and FASTQ files, plain or compressed, detected by content."""

import bz2
import hashlib
import io
import logging
import lzma
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final, cast

from backports import zstd
from dnaio.exceptions import FileFormatError
from dnaio.readers import FastqReader
from isal import igzip_lib

from virnuc_core.errors import InputError, UnreadableInputError
from virnuc_core.files import is_stream
from virnuc_core.host_memory import memory_limit
from virnuc_core.plain_text import visible
from virnuc_core.specs import Alphabet, InputFile

logger = logging.getLogger(__name__)

STDIN: Final = "-"
_stdin_copy: Path | None = None

_BUFFER_BYTES: Final = 1 << 17
_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n\v\f"
# Control characters become "?", as non-ASCII letters do: sequences are also written to tables.
_UPPER: Final = bytes(c if 32 < c < 127 else ord("?") for c in bytes(range(256)).upper())
_COMPRESSIONS: Final = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},  # skippable frames
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
}  # by the first bytes
_HEADER_BYTES: Final = 16  # enough to identify a member


@dataclass(frozen=True, slots=True)
class Record:
    """A record, cleaned but not validated: upper case, without whitespace, in DNA with U read as T.

    `number` is 1-based over all files; `name` is the first word of the header, or "".
    """

    number: int
    path: str
    name: str
    sequence: bytes


def iter_records(paths: Sequence[str | Path], alphabet: Alphabet) -> Iterator[Record]:
    """Yields all records of all files in order, including unusable ones (see `rejection_reason`), one at a time in memory.

    Files are FASTA or FASTQ, plain or gzip, bgzip, zstd, xz, bzip2; "-" is standard input. In FASTA, blank lines and lines that
    begin with `#` are skipped; whitespace within a sequence is dropped, and U in DNA is read as T.

    Raises:
        InputError: a file is missing, not a file, truncated, corrupt, neither FASTA nor FASTQ, or has a record within another.
    """
    number = 0
    for path in map(str, paths):
        first = number
        with reading_text(path) as text:
            for header, letters in _parse(text, path):
                number += 1
                words = header.split(maxsplit=1)
                name = words[0] if words else ""
                yield Record(number, path, name, clean(letters, alphabet))
        if number == first:
            logger.warning("%s contains no sequence record", visible(path))


def clean(letters: bytes, alphabet: Alphabet) -> bytes:
    """Upper case, without whitespace, in DNA with U read as T."""
    return letters.translate(_UPPER.replace(b"U", b"T") if alphabet == "dna" else _UPPER, _BLANKS)


def rejection_reason(sequence: bytes, alphabet: Alphabet) -> str | None:
    """Why a cleaned sequence is unusable, or None.

    DNA may have up to 10% of letters that are not IUPAC nucleotide codes (their codons are dropped later); a protein may
    have only letters, `*`, `-` and `.`.
    """
    if not sequence:
        return "empty sequence"
    if alphabet == "dna":
        foreign = len(sequence.translate(None, b"ACGTUNRYSWKMBDHV"))
        if foreign > 0.1 * len(sequence):
            return f"not DNA: {foreign} of {len(sequence)} letters are not IUPAC nucleotide codes"
        return None
    if odd := sequence.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ*-."):
        return f"not a protein: {len(odd)} letters are not amino-acid codes, the first {chr(odd[0])!r}"
    return None


def input_digest(path: str | Path) -> InputFile:
    """Identity of a file as stored.

    Raises:
        InputError: the file is missing, unreadable, or not a regular file.
    """
    path = str(path)
    if _stdin_copy is None if path == STDIN else is_stream(Path(path)):
        raise InputError(f"{path} can be read only once. Save it in a file first.")
    with _reading(path) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return InputFile(name=Path(path).name, size=stream.tell(), sha256=digest.hexdigest())


@contextmanager
def rereadable_stdin() -> Iterator[None]:
    """Copies standard input to a file, so that "-" can be read more than once in this block."""
    global _stdin_copy
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        copy = Path(scratch) / "stdin"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        _stdin_copy = copy
        try:
            yield
        finally:
            _stdin_copy = None


@contextmanager
def reading_text(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file, decompressing it if needed; errors while it is read name it.

    Raises:
        InputError: it is missing, not a file, truncated or corrupt.
    """
    with _reading(path) as raw:
        compression = _compression_of(raw.peek(_HEADER_BYTES))
        if compression is None:
            yield raw
        else:
            blocks = _decompressed(raw, compression, path)
            with io.BufferedReader(_Stream(blocks), _BUFFER_BYTES) as text:
                yield cast(io.BufferedReader, text)


def _parse(text: io.BufferedReader, path: str) -> Iterator[tuple[str, bytes]]:
    """Header and letters of each record; letters outside ASCII become "?", which counts as foreign in `rejection_reason`."""
    if text.peek(len(_BOM)).startswith(_BOM):
        text.read(len(_BOM))
    while (ahead := text.peek()) and not ahead.lstrip():
        text.read(len(ahead))
    text.read(len(ahead) - len(ahead.lstrip()))
    first = ahead.lstrip()[:1]
    if first in (b">", b"#"):
        for record in _fasta_records(text, path):
            header, _, lines = record.partition(b"\n")
            name = header.decode()
            yield name, _fasta_letters(name, lines, path)
    elif first == b"@":
        for entry in FastqReader(cast(BinaryIO, _LineGuard(text, path))):
            yield entry.name, entry.sequence.encode("ascii", "replace")
    elif first:
        begin = text.peek(20)[:20].decode("latin-1")
        raise InputError(f"{path} is neither FASTA nor FASTQ: it begins with {begin!r}.")


def _fasta_records(text: io.BufferedReader, path: str) -> Iterator[bytes]:
    r"""What follows the `>` of each record, up to the next one; a line may end with `\n` or with `\n\n`."""
    most, has_begun, record = _most_letters(), False, bytearray(b"\n")
    while block := text.read1(_BUFFER_BYTES):
        unseen = max(len(record) - 1, 0)
        record += block.replace(b"\r", b"\n")
        ended: list[bytes] = []
        if record.find(b"\n>", unseen) >= 0:
            *ended, rest = bytes(record).split(b"\n>")
            record = bytearray(rest)
        if not has_begun:
            has_begun = bool(ended)
            before = ended.pop(0) if ended else bytes(record)
            if found := re.sub(rb"(?m)^[ \t]*#.*$", b"", before).strip():
                raise InputError(f"{path} is neither FASTA nor FASTQ: {found[:20]!r} follows its comments.")
        yield from ended
        if len(record) > most:
            raise _too_large(path, len(record))
    if has_begun:
        yield bytes(record)


def _fasta_letters(name: str, lines: bytes, path: str) -> bytes:
    if b"#" in lines:
        # A comment with a ">" may have lost its line end, but not where the next record begins behind it.
        lines = re.sub(rb"(?m)^[ \t]*#[^>\n]*$", b"", lines[: _end_of_letters(lines)])
    signs = (b">", b"@", b"+", _BOM)
    if any(sign in lines for sign in signs):
        place = min(place for sign in signs if (place := lines.find(sign)) >= 0)
        letters = len(lines[:place].translate(None, _BLANKS))
        rest = lines[place : place + 40].partition(b"\n")[0].decode(errors="backslashreplace")
        raise InputError(
            f"{path}: after {letters:,} letters of the sequence of {visible(name[:40])!r} comes {visible(rest)!r}, where "
            "another record seems to begin. Begin each record on a new line (`cat` joins files that lack a final newline), "
            "and give FASTA and FASTQ in separate files."
        )
    return lines if lines.isascii() else lines.decode().replace("\xa0", "").encode("ascii", "replace")


def _end_of_letters(lines: bytes) -> int:
    """Where the comments and blank lines at the end begin."""
    end = len(lines)
    while end > 0:
        begin = lines.rfind(b"\n", 0, end) + 1
        if lines[begin:end].strip()[:1] not in (b"", b"#"):
            break
        end = begin - 1
    return max(end, 0)


class _LineGuard:
    """Raises InputError before a line of FASTQ takes half of the memory: dnaio's buffer holds up to two copies of it."""

    def __init__(self, text: io.BufferedReader, path: str) -> None:
        self._text, self._path = text, path
        self._most, self._length = _most_letters() // 2, 0

    def read(self, size: int = -1) -> bytes:
        block = self._text.read(size)
        end = block.rfind(b"\n")
        self._length = len(block) - 1 - end + (self._length if end < 0 else 0)
        if self._length > self._most:
            raise _too_large(self._path, self._length)
        return block


def _most_letters() -> int:
    """Those that take half of the memory, at 8 bytes each: a record's text, letters, their copies and frames."""
    return memory_limit() // 2 // 8


def _too_large(path: str, length: int) -> InputError:
    return InputError(
        f"{path} contains a record of more than {length:,} bytes, which does not fit in memory. Split or remove it."
    )


@contextmanager
def _reading(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file or standard input; errors while it is read name it."""
    source: str | int = path
    if path == STDIN:
        source = sys.stdin.fileno() if _stdin_copy is None else str(_stdin_copy)
    try:
        with io.FileIO(source, closefd=isinstance(source, str)) as file:
            yield io.BufferedReader(file, _BUFFER_BYTES)
    except (  # type: ignore[misc]
        OSError,
        ValueError,
        EOFError,
        MemoryError,
        FileFormatError,
        lzma.LZMAError,
        zstd.ZstdError,
        igzip_lib.IsalError,
    ) as error:
        match error:
            case FileNotFoundError():
                problem = "does not exist. Check the path of the sequence file."
            case IsADirectoryError():
                problem = "is a folder. Give the sequence files in it."
            case EOFError():
                problem = "is truncated: its compressed data end early. Copy or download it again."
            case UnicodeDecodeError():
                problem = f"is not text in UTF-8 ({error.reason}). If its headers are Latin-1, convert it: iconv -f latin1 -t utf-8"
            case MemoryError():
                problem = "contains a record that does not fit in memory. Split it, or use a machine with more memory."
            case FileFormatError():
                problem = f"cannot be parsed: {error}. Fix or remove that record."
            case OSError() | ValueError():  # ValueError: an invalid path
                problem = f"cannot be read: {error}. Check the file and its permissions."
            case _:
                problem = f"is damaged: {error}. Copy or download it again."
        # Decompressors report damaged data as an OSError without a number.
        is_from_disk = isinstance(error, OSError) and error.errno is not None
        raise (UnreadableInputError if is_from_disk else InputError)(f"{path} {problem}") from error


class _Stream(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        block = self._rest or next(self._blocks, b"")
        size = min(len(block), len(buffer))
        buffer[:size] = block[:size]
        self._rest = block[size:]
        return size


def _compression_of(start: bytes) -> str | None:
    return next((name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None)


def _decompressor(compression: str) -> Any:
    if compression == "gzip":
        return igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
    if compression == "zstd":
        # The window of `zstd --long=31`.
        largest_window = zstd.DecompressionParameter.window_log_max.bounds()[1]
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: largest_window})
    return lzma.LZMADecompressor(lzma.FORMAT_XZ) if compression == "xz" else bz2.BZ2Decompressor()


def _decompressed(raw: io.BufferedReader, compression: str, path: str) -> Iterator[bytes]:
    """All members of a compressed file, with zero padding allowed between and after them, as in gzip, xz and tape archives.

    Raises EOFError for truncated data, InputError for trailing garbage, and what the decompressor does for corrupt data.
    """
    ahead = b""
    lacks_end = False
    while True:
        ahead = ahead.lstrip(b"\0")
        while len(ahead) < _HEADER_BYTES and (more := raw.read1(_BUFFER_BYTES)):
            ahead = (ahead + more).lstrip(b"\0")
        # A bgzip member is a gzip member with this mark.
        is_bgzip = compression == "gzip" and ahead[12:16] == b"BC\x02\x00"
        is_cut = bool(ahead) and any(magic.startswith(ahead) for magic in _COMPRESSIONS)
        if is_cut or (lacks_end and not is_bgzip):
            raise EOFError
        if not ahead:
            return
        if _compression_of(ahead) != compression:
            raise InputError(
                f"{path} is damaged: its {compression} data are followed by other bytes. Copy or download it again."
            )
        member = _decompressor(compression)
        lacks_end = False
        while not member.eof:
            data = b""
            if member.needs_input:
                data, ahead = ahead or raw.read1(_BUFFER_BYTES), b""
                if not data:
                    raise EOFError
            if content := member.decompress(data, _BUFFER_BYTES):
                # A bgzip file truncated between blocks is valid gzip, but lacks its empty last block.
                lacks_end = is_bgzip
                yield content
        ahead = member.unused_data
