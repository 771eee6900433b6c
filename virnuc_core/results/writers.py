"""Writes result files: bytes, Parquet tables and sorted lines.

The files are opened by context managers, which yield a function to pass the content to.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from isal import igzip_threaded

from virnuc_core.columns import Float32, Float64
from virnuc_core.files import atomic_path

NOT_AVAILABLE: Final = "NA"

Write = Callable[[bytes], object]
AppendRows = Callable[[pa.Table], None]


@contextmanager
def open_stream(path: Path, *, compress: bool = False, block_bytes: int = 1 << 20) -> Iterator[Write]:
    """A new file of bytes; like those below, it appears when the block ends without an error.

    `block_bytes` are compressed at a time, whatever the writes; equal content gives equal bytes, since there is no name or time
    in the header.
    """
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        if not compress:
            yield file.write
            return
        waiting = bytearray()
        with igzip_threaded.open(file, "wb", threads=4, block_size=block_bytes) as compressed:

            def write(content: bytes) -> None:
                waiting.extend(content)
                whole = len(waiting) - len(waiting) % block_bytes
                for begin in range(0, whole, block_bytes):
                    compressed.write(waiting[begin : begin + block_bytes])
                del waiting[:whole]

            yield write
            compressed.write(waiting)


@contextmanager
def open_parquet(path: Path, schema: pa.Schema, group_rows: int = 1 << 16) -> Iterator[AppendRows]:
    """A new Parquet file, with row groups of `group_rows`."""
    with (
        atomic_path(path) as temporary,
        temporary.open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        waiting = schema.empty_table()

        def append(rows: pa.Table) -> None:
            nonlocal waiting
            waiting = pa.concat_tables([waiting, rows])
            while len(waiting) >= group_rows:
                write(waiting.slice(0, group_rows))
                waiting = waiting.slice(group_rows)

        def write(rows: pa.Table) -> None:
            # As one chunk, since page boundaries depend on the chunks.
            writer.write_table(rows.combine_chunks(), group_rows)

        yield append
        if len(waiting):
            write(waiting)


@contextmanager
def open_sorted_lines(path: Path, header: bytes) -> Iterator[AppendRows]:
    """A new table of text, whose rows are sorted by their first column (by code points)."""
    # Unnamed, so that a killed process leaves no file behind.
    with tempfile.TemporaryFile(dir=path.parent) as spilled:
        rows = SortedRows(spilled)
        yield rows.append
        with open_stream(path) as write:
            write(header)
            for part in rows:
                write(joined_lines(part.columns))


class SortedRows:
    """Sorts rows by their first column of text, `in_memory` bytes at a time: sorted runs in the empty file `spilled`.

    They are merged when read, `merged_rows` of each at a time.
    """

    def __init__(self, spilled: IO[bytes], in_memory: int = 1 << 27, merged_rows: int = 1 << 13) -> None:
        self._spilled = spilled
        self._in_memory = in_memory
        self._merged_rows = merged_rows
        self._waiting: list[pa.Table] = []
        self._bounds = [0]

    def append(self, rows: pa.Table) -> None:
        """Adds rows in any order."""
        self._waiting.append(rows)
        if sum(rows.nbytes for rows in self._waiting) >= self._in_memory:
            run = _sorted(self._waiting)
            with pa.ipc.new_stream(self._spilled, run.schema) as stream:
                stream.write_table(run, self._merged_rows)
            self._bounds.append(self._spilled.tell())
            self._waiting.clear()

    def __iter__(self) -> Iterator[pa.Table]:
        runs: list[Iterator[pa.RecordBatch]] = []
        if self._bounds[1:]:
            self._spilled.flush()
            content = pa.py_buffer(mmap(self._spilled.fileno(), 0, access=ACCESS_READ))
            parts = map(content.slice, self._bounds[:-1], np.diff(self._bounds).tolist())
            runs += [iter(pa.ipc.open_stream(part)) for part in parts]
        if self._waiting:
            runs.append(iter(_sorted(self._waiting).to_batches(self._merged_rows)))
        return _merged([(pa.Table.from_batches([batch]) for batch in run) for run in runs])


def _sorted(tables: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(tables).combine_chunks()
    return rows.take(pc.sort_indices(rows[0]))


def _merged(runs: Sequence[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """Merges runs of sorted, non-empty tables: in each step the rows up to the least of the last keys of their next tables."""
    following = {number: rows for number, run in enumerate(runs) if (rows := next(run, None)) is not None}
    while following:
        bound = min(rows[0][-1].as_py() for rows in following.values())
        parts = []
        for number, rows in list(following.items()):
            count = bisect_right(rows[0], bound, key=lambda key: key.as_py())
            parts.append(rows.slice(0, count))
            if count < len(rows):
                following[number] = rows.slice(count)
            elif (rows := next(runs[number], None)) is not None:
                following[number] = rows
            else:
                del following[number]
        yield _sorted(parts)


def count_values(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value occurs, in the order of their first rows."""
    return {found["values"]: found["counts"] for found in column.value_counts().to_pylist()}


def header_line(columns: Iterable[str]) -> bytes:
    """Header of a tab-separated table."""
    return "\t".join(columns).encode() + b"\n"


def table_lines(table: pa.Table, joined_rows: int = 1 << 16) -> bytes:
    """Tab-separated rows, with `NOT_AVAILABLE` for nulls and numbers with six decimals; see `joined_lines`."""

    def cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
        if not pa.types.is_floating(column.type):
            return column.cast(pa.string()).fill_null(NOT_AVAILABLE)
        numbers = decimals(column.fill_null(0.0).to_numpy(), 6)
        return pc.if_else(column.is_valid(), numbers, NOT_AVAILABLE)

    return joined_lines(list(map(cells, table.columns)), joined_rows)


def joined_lines(columns: Sequence[pa.StringArray | pa.ChunkedArray], joined_rows: int = 1 << 16) -> bytes:
    """Tab-separated rows of columns of text without nulls, `joined_rows` at a time: an array has at most 2 GiB of text."""
    table = pa.table(list(columns), [str(number) for number in range(len(columns))])
    parts = []
    for batch in table.to_batches(joined_rows):
        *first, last = batch.columns
        lines = pc.binary_join_element_wise(*first, pc.binary_join_element_wise(last, "\n", ""), "\t")
        _, offsets, text = lines.buffers()
        parts.append(text[: np.frombuffer(offsets, np.int32)[len(lines)]].to_pybytes())
    return b"".join(parts)


def decimals(values: Float64, places: int) -> pa.StringArray:
    """The text that the format `.{places}f` gives each of the numbers (n,)."""
    scaled = values * 10.0**places
    rounded = np.rint(scaled)
    # The product is exact to half a unit in its last place, which may decide; integers have no negative zero.
    is_sure = 0.5 - np.abs(scaled - rounded) > np.abs(scaled) * np.finfo(np.float64).eps
    is_sure &= (rounded != 0) | ~np.signbit(values)
    number = np.where(is_sure, rounded, 0).astype(np.int64)
    halves = pa.py_buffer(np.stack((number, number >> 63), axis=1))  # two's complement in 128 bits
    text = pa.Array.from_buffers(pa.decimal128(18, places), len(number), [None, halves]).cast(pa.string())
    unsure = [f"{value:.{places}f}" for value in values[~is_sure].tolist()]
    return pc.replace_with_mask(text, pa.array(~is_sure), pa.array(unsure, pa.string()))


def shortest_digits(values: Float32) -> pa.StringArray:
    """The text that `str` gives each of the numbers fp32 (n,): the shortest digits that give the number again."""
    text = pa.array(values).cast(pa.string())
    # Elsewhere Arrow writes the same digits with other exponents, and integers without a point.
    is_other = ~((values.astype(np.float64) >= 1e-4) & (values < 1))
    return pc.replace_with_mask(
        text, pa.array(is_other), pa.array(values[is_other].astype("S")).cast(pa.string())
    )


def fasta_record(name: str, bases: bytes) -> bytes:
    """A record with 80 bases per line, and no description: anvi'o takes the whole header for the name."""
    lines = (bases[i : i + 80] for i in range(0, len(bases), 80))
    return b"\n".join((f">{name}".encode(), *lines, b""))
