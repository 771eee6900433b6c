"""Results as text: tab-separated tables with a header line, six decimals and `NA` for missing values; FASTA."""

from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from pathlib import Path
from typing import Final, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.files import atomic_path

NOT_AVAILABLE: Final = "NA"
_LAST_DECIMAL: Final = 1e-6
_FASTA_LINE: Final = 80


@contextmanager
def open_table(path: Path, columns: tuple[str, ...]) -> Iterator[TextIO]:
    """A tab-separated file, with its header, that appears when the block has ended without an error."""
    with open_text(path) as file:
        file.write(header_line(columns))
        yield file


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file that appears when the block has ended without an error."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield file


@contextmanager
def open_gzip(path: Path) -> Iterator[GzipFile]:
    """A file compressed with gzip that appears when the block has ended without an error."""
    # Without name and time, equal content makes equal files.
    with (
        atomic_path(path) as temporary,
        temporary.open("wb") as raw,
        GzipFile("", "wb", 6, raw, mtime=0) as stream,
    ):
        yield stream


def header_line(columns: tuple[str, ...]) -> str:
    """The first line of a table."""
    return "\t".join(columns) + "\n"


def text_lines(table: pa.Table, threshold: float) -> Iterator[str]:
    """The rows of a table as lines; numbers stay on their side of the threshold, see `six_decimals`."""
    cells = (_cells(column, threshold) for column in table.columns)
    joined = pc.binary_join_element_wise(*cells, "\t")
    return (f"{line}\n" for line in joined.to_pylist())


def fasta_record(header: str, bases: bytes) -> bytes:
    """A record with its line ends."""
    lines = (bases[i : i + _FASTA_LINE] for i in range(0, len(bases), _FASTA_LINE))
    return b"\n".join((f">{header}".encode(), *lines, b""))


def six_decimals(value: float, threshold: float) -> str:
    """A number, rounded; where that would cross the threshold of a call, to the next one on its own side."""
    text = f"{value:.6f}"
    if abs(value - threshold) < _LAST_DECIMAL and (float(text) >= threshold) != (value >= threshold):
        return f"{float(text) + (_LAST_DECIMAL if value >= threshold else -_LAST_DECIMAL):.6f}"
    return text


def _cells(column: pa.ChunkedArray, threshold: float) -> pa.ChunkedArray:
    """Numbers and missing values as they are written; string (n,)."""
    if pa.types.is_floating(column.type):
        numbers = (None if value is None else six_decimals(value, threshold) for value in column.to_pylist())
        return pa.chunked_array([pa.array(numbers, pa.string())]).fill_null(NOT_AVAILABLE)
    return column.cast(pa.string()).fill_null(NOT_AVAILABLE)
