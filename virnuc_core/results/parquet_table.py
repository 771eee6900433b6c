"""Tables as Parquet, written in row groups whose bounds depend on nothing but the rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from virnuc_core.files import atomic_path

GROUP_ROWS: Final = 1 << 16


class GroupWriter(Protocol):
    """Takes row groups, as `pyarrow.parquet.ParquetWriter` does."""

    def write_table(self, rows: pa.Table, row_group_size: int) -> None:
        """Takes rows that are at most one group."""


class ParquetTable:
    """Collects rows and writes them a row group at a time.

    Args:
        writer: takes the groups.
        schema: names and types of the columns.
    """

    def __init__(self, writer: GroupWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._waiting = schema.empty_table()

    def append(self, rows: pa.Table) -> None:
        """Adds rows."""
        self._waiting = pa.concat_tables([self._waiting, rows])
        while len(self._waiting) >= GROUP_ROWS:
            self._write(self._waiting.slice(0, GROUP_ROWS))
            self._waiting = self._waiting.slice(GROUP_ROWS)

    def finish(self) -> None:
        """Writes the rows that do not fill a group."""
        if len(self._waiting):
            self._write(self._waiting)

    def _write(self, rows: pa.Table) -> None:
        # In one piece: the bounds of its pages would depend on the pieces.
        self._writer.write_table(rows.combine_chunks(), GROUP_ROWS)


@contextmanager
def open_parquet(path: Path, schema: pa.Schema) -> Iterator[ParquetTable]:
    """A Parquet file that appears when the block has ended without an error."""
    with (
        atomic_path(path) as temporary,
        temporary.open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        table = ParquetTable(writer, schema)
        yield table
        table.finish()
