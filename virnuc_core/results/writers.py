"""Writes result files, or compares them with existing ones: bytes, Parquet tables and sorted lines.

The methods of `ResultWriter` and `ResultComparison` are context managers that yield a function to pass the content to.
"""

import gzip
import heapq
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.files import atomic_path

NOT_AVAILABLE: Final = "NA"
ROW_GROUP_ROWS: Final = 1 << 16
_LAST_DECIMAL: Final = 1e-6
_FASTA_LINE: Final = 80
_SORTED_IN_MEMORY: Final = 1 << 20  # lines
_READ_BYTES: Final = 1 << 15  # more than the longest line: names have at most 1,000

Write = Callable[[bytes], object]
AppendRows = Callable[[pa.Table], None]
AddLines = Callable[[Iterable[bytes]], None]


class ResultWriter:
    """Writes result files; each appears when its block ends without an error."""

    @contextmanager
    def stream(self, path: Path, *, compress: bool = False) -> Iterator[Write]:
        """Opens a file of bytes."""
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            if compress:
                # No name or time in the header: equal content gives byte-identical files.
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
                    yield compressed.write
            else:
                yield file.write

    @contextmanager
    def parquet(self, path: Path, schema: pa.Schema) -> Iterator[AppendRows]:
        """Opens a Parquet file, with row groups of `ROW_GROUP_ROWS`."""
        with (
            atomic_path(path) as temporary,
            temporary.open("wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            groups = _RowGroups(schema, lambda rows: writer.write_table(rows, ROW_GROUP_ROWS))
            yield groups.append
            groups.finish()

    @contextmanager
    def sorted_lines(self, path: Path, header: bytes) -> Iterator[AddLines]:
        """Opens a file of a header and lines, which are sorted by their first column (by code points)."""
        # Unnamed, so that a killed process leaves no file behind.
        with tempfile.TemporaryFile(dir=path.parent) as spilled:
            lines = SortedLines(spilled)
            yield lines.extend
            with self.stream(path) as write:
                write(header)
                for line in lines:
                    write(line)


class ResultComparison(ResultWriter):
    """Compares instead of writing, in bounded memory, and collects existing files that differ.

    Compressed files are compared by content, since the output of zlib and pyarrow depends on their version.
    """

    def __init__(self) -> None:
        self.differing: set[Path] = set()

    @contextmanager
    def stream(self, path: Path, *, compress: bool = False) -> Iterator[Write]:
        """See `ResultWriter`."""
        if not path.exists():
            yield lambda _: None
            return
        with gzip.open(path) if compress else path.open("rb") as found:

            def compare(expected: bytes) -> None:
                if path not in self.differing and _read(found, len(expected)) != expected:
                    self.differing.add(path)

            yield compare
            if path not in self.differing and _read(found, 1) != b"":
                self.differing.add(path)

    @contextmanager
    def parquet(self, path: Path, schema: pa.Schema) -> Iterator[AppendRows]:
        """See `ResultWriter`."""
        try:
            found = pq.ParquetFile(path)
        except (pa.ArrowException, OSError):  # pyarrow raises OSError for what it cannot parse, too
            if path.exists():
                self.differing.add(path)
            yield lambda _: None
            return
        with found:
            is_same: list[bool] = []

            def compare(rows: pa.Table) -> None:
                is_same.append(_has_row_group(found, len(is_same), rows))

            groups = _RowGroups(schema, compare)
            yield groups.append
            groups.finish()
            if not all(is_same) or found.schema_arrow != schema or len(is_same) != found.num_row_groups:
                self.differing.add(path)

    @contextmanager
    def sorted_lines(self, path: Path, header: bytes) -> Iterator[AddLines]:
        """See `ResultWriter`; compares sums of digests, which do not depend on the order, so nothing is sorted."""
        expected = 0

        def add(lines: Iterable[bytes]) -> None:
            nonlocal expected
            expected += sum(map(_digest, lines))

        yield add
        if path.exists() and _sorted_digest(path, header) != expected:
            self.differing.add(path)


def _read(file: gzip.GzipFile | io.BufferedReader, size: int) -> bytes | None:
    try:
        return file.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return None


def _has_row_group(file: pq.ParquetFile, number: int, rows: pa.Table) -> bool:
    try:
        return number < file.num_row_groups and bool(file.read_row_group(number).equals(rows))
    except (pa.ArrowException, OSError):
        return False


def _digest(line: bytes) -> int:
    return int.from_bytes(blake2b(line, digest_size=32).digest())


def _sorted_digest(path: Path, header: bytes) -> int | None:
    """Sum of the digests of the lines after the header; None if they are not sorted, or the header differs."""
    total, previous = 0, b""
    with path.open("rb") as lines:
        if next(lines, b"") != header:
            return None
        for line in lines:
            if (name := _first_column(line)) < previous:
                return None
            previous = name
            total += _digest(line)
    return total


class _RowGroups:
    """Regroups rows, so that row group boundaries do not depend on how many rows arrive at a time."""

    def __init__(self, schema: pa.Schema, write_group: AppendRows) -> None:
        self._write_group = write_group
        self._waiting = schema.empty_table()

    def append(self, rows: pa.Table) -> None:
        self._waiting = pa.concat_tables([self._waiting, rows])
        while len(self._waiting) >= ROW_GROUP_ROWS:
            self._write(self._waiting.slice(0, ROW_GROUP_ROWS))
            self._waiting = self._waiting.slice(ROW_GROUP_ROWS)

    def finish(self) -> None:
        if len(self._waiting):
            self._write(self._waiting)

    def _write(self, rows: pa.Table) -> None:
        # As one chunk, since page boundaries depend on the chunks.
        self._write_group(rows.combine_chunks())


class SortedLines:
    """Sorts lines by their first column, `in_memory` at a time: sorted runs in the empty file `spilled`, merged when read."""

    def __init__(self, spilled: IO[bytes], in_memory: int = _SORTED_IN_MEMORY) -> None:
        self._spilled = spilled
        self._in_memory = in_memory
        self._lines: list[bytes] = []
        self._bounds = [0]

    def extend(self, lines: Iterable[bytes]) -> None:
        """Adds newline-terminated lines."""
        for line in lines:
            self._lines.append(line)
            if len(self._lines) >= self._in_memory:
                self._spill()

    def __iter__(self) -> Iterator[bytes]:
        self._lines.sort(key=_first_column)
        self._spilled.flush()
        runs = map(self._run, self._bounds[:-1], self._bounds[1:])
        return heapq.merge(*runs, self._lines, key=_first_column)

    def _spill(self) -> None:
        self._lines.sort(key=_first_column)
        self._spilled.writelines(self._lines)
        self._bounds.append(self._spilled.tell())
        self._lines.clear()

    def _run(self, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            block = os.pread(self._spilled.fileno(), min(_READ_BYTES, end - begin), begin)
            block = block[: block.rindex(b"\n") + 1]
            begin += len(block)
            yield from io.BytesIO(block)


def _first_column(line: bytes) -> bytes:
    """As bytes: UTF-8 sorts by code points."""
    return line.partition(b"\t")[0]


def header_line(columns: Iterable[str]) -> bytes:
    """Header of a tab-separated table."""
    return "\t".join(columns).encode() + b"\n"


def table_lines(table: pa.Table, threshold: float) -> bytes:
    """Tab-separated rows, with `NOT_AVAILABLE` for nulls and numbers as `six_decimals`."""
    cells = (_cells(column, threshold) for column in table.columns)
    lines = pc.binary_join_element_wise(*cells, "\t").to_pylist()
    return "".join(f"{line}\n" for line in lines).encode()


def _cells(column: pa.ChunkedArray, threshold: float) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):
        numbers = (None if value is None else six_decimals(value, threshold) for value in column.to_pylist())
        column = pa.chunked_array([pa.array(numbers, pa.string())])
    return column.cast(pa.string()).fill_null(NOT_AVAILABLE)


def six_decimals(value: float, threshold: float) -> str:
    """Rounds to six decimals; where that would cross the threshold of a call, to the next value on its own side."""
    text = f"{value:.6f}"
    if abs(value - threshold) < _LAST_DECIMAL and (float(text) >= threshold) != (value >= threshold):
        return f"{float(text) + (_LAST_DECIMAL if value >= threshold else -_LAST_DECIMAL):.6f}"
    return text


def fasta_record(header: str, bases: bytes) -> bytes:
    """A record with `_FASTA_LINE` bases per line."""
    lines = (bases[i : i + _FASTA_LINE] for i in range(0, len(bases), _FASTA_LINE))
    return b"\n".join((f">{header}".encode(), *lines, b""))
