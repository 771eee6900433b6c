"""Sequence files in, records out: FASTA and FASTQ, plain or compressed, recognised by content."""

import hashlib
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from dnaio import SequenceRecord
from dnaio.exceptions import FileFormatError
from dnaio.readers import FastaReader, FastqReader

from virnuc_core.errors import InputError
from virnuc_core.plain_text import visible
from virnuc_core.sequences.decompression import BUFFER_BYTES, DamagedDataError, decompressed
from virnuc_core.sequences.record_guard import FASTA_RECORD, FASTQ_LINE, RecordGuard
from virnuc_core.specs import Alphabet, InputFile

logger = logging.getLogger(__name__)

STDIN = "-"
MAX_FOREIGN_SHARE = 0.1

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n\v\f"
# Control characters become "?", as letters outside ASCII do: a sequence is written to tables, too.
_UPPER = bytes(c if 32 < c < 127 else ord("?") for c in bytes(range(256)).upper())
_UPPER_DNA = _UPPER.replace(b"U", b"T")
_NUCLEOTIDE_CODES = b"ACGTUNRYSWKMBDHV"
_AMINO_ACID_CODES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ*-."


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it stands in a file, cleaned but not judged.

    Attributes:
        number: 1-based place in the input, counted over all files.
        path: the file it came from.
        name: first word of the header, "" when there is none.
        sequence: upper case without blanks; U read as T when the alphabet is DNA.
    """

    number: int
    path: str
    name: str
    sequence: bytes


def iter_records(paths: Sequence[str | Path], alphabet: Alphabet) -> Iterator[Record]:
    """Yields every record of every file in order; one record is in memory at a time.

    Lines that begin with `#` and blank lines are skipped, as dnaio does; blanks within a sequence are
    dropped. Records that cannot be used are yielded too: see `rejection_reason`.

    Args:
        paths: FASTA or FASTQ files, plain or gzip, bgzip, zstd, xz, bzip2; "-" is standard input.
        alphabet: "dna" reads U as T.

    Raises:
        InputError: a file is missing, not a file, truncated, damaged, or neither FASTA nor FASTQ.
    """
    table = _UPPER_DNA if alphabet == "dna" else _UPPER
    number = 0
    for path in map(str, paths):
        first = number
        with _reading(path) as stream:
            for header, letters in _parse(stream, path):
                number += 1
                words = header.split(maxsplit=1)
                # A letter outside ASCII becomes "?", which the record is then judged by.
                sequence = letters.encode("ascii", "replace").translate(table, _BLANKS)
                yield Record(number, path, words[0] if words else "", sequence)
        if number == first:
            logger.warning("%s holds no sequence record", visible(path))


def rejection_reason(sequence: bytes, alphabet: Alphabet) -> str | None:
    """Why a cleaned sequence cannot be used, or None when it can.

    DNA may hold up to 10 % of letters that are not IUPAC nucleotide codes (their codons are dropped
    later); a protein may hold only letters, `*`, `-` and `.`.
    """
    if not sequence:
        return "empty sequence"
    if alphabet == "dna":
        foreign = len(sequence.translate(None, _NUCLEOTIDE_CODES))
        if foreign > MAX_FOREIGN_SHARE * len(sequence):
            return f"not DNA: {foreign} of {len(sequence)} letters are not IUPAC nucleotide codes"
        return None
    odd = sequence.translate(None, _AMINO_ACID_CODES)
    if odd:
        return f"not a protein: {len(odd)} letters are not amino-acid codes, the first is {chr(odd[0])!r}"
    return None


def input_digest(path: str | Path) -> InputFile:
    """Name, size and SHA-256 of a file as it is stored.

    Raises:
        InputError: the file is missing, unreadable, or can be read only once or without end.
    """
    path = Path(path)
    is_stream = os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
    if str(path) == STDIN or is_stream:
        raise InputError(f"{path} can be read only once. Save it in a file first.")
    with _reading(str(path)) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return InputFile(name=path.name, size=stream.tell(), sha256=digest.hexdigest())


class _Entry(NamedTuple):
    """Stands in for dnaio's record class, which refuses headers with letters outside ASCII."""

    name: str
    sequence: str
    qualities: str | None


@contextmanager
def reading_text(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file, decompressed where need be, and names it in whatever goes wrong while it is read.

    Raises:
        InputError: it is missing, not a file, truncated or damaged.
    """
    with _reading(path) as raw, decompressed(raw) as text:
        yield text


def _parse(raw: io.BufferedReader, path: str) -> Iterator[tuple[str, str]]:
    """Yields (header, sequence letters) of an open file, whatever its compression and format."""
    text = decompressed(raw)
    if text.peek(len(_BOM)).startswith(_BOM):
        text.read(len(_BOM))
    while (ahead := text.peek()) and not ahead.lstrip():
        text.read(len(ahead))
    text.read(len(ahead) - len(ahead.lstrip()))
    first = ahead.lstrip()[:1]
    entries: Iterable[_Entry | SequenceRecord]
    if first in (b">", b"#"):
        entries = FastaReader(cast(BinaryIO, RecordGuard(text, FASTA_RECORD, path)), sequence_class=_Entry)
    elif first == b"@":
        entries = FastqReader(cast(BinaryIO, RecordGuard(text, FASTQ_LINE, path)))
    elif first:
        raise InputError(f"{path} is neither FASTA nor FASTQ: it begins with {text.peek(20)[:20]!r}.")
    else:
        entries = ()
    with text:
        for entry in entries:
            yield entry.name, entry.sequence


@contextmanager
def _reading(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file or standard input and names it in whatever goes wrong while it is read."""
    source: str | int = sys.stdin.fileno() if path == STDIN else path
    try:
        with io.FileIO(source, closefd=path != STDIN) as file:
            yield io.BufferedReader(file, BUFFER_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist. Check the path of the sequence file.") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder. Name the sequence files in it.") from error
    except EOFError as error:
        raise InputError(
            f"{path} is truncated: its compressed data end early. Copy or download it again."
        ) from error
    except DamagedDataError as error:
        raise InputError(f"{path} is damaged: {error}. Copy or download it again.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8 ({error.reason}). If its headers are Latin-1, convert it: "
            f"iconv -f latin1 -t utf-8"
        ) from error
    except MemoryError as error:
        raise InputError(
            f"{path} holds a record that does not fit into memory. Split it, or use a machine with more memory."
        ) from error
    except FileFormatError as error:
        raise InputError(f"{path} cannot be parsed: {error}. Mend or remove that record.") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file system can hold
        raise InputError(f"{path} cannot be read: {error}. Check the file and its permissions.") from error
