"""Tables as text: tab-separated, with a header line, six decimals, and `NA` for what there is not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.atomic_write import atomic_path

NOT_AVAILABLE: Final = "NA"


@contextmanager
def open_table(path: Path, columns: tuple[str, ...]) -> Iterator[TextIO]:
    """A tab-separated file, with its header, that appears when the block has ended without an error."""
    with open_text(path) as file:
        file.write("\t".join(columns) + "\n")
        yield file


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file that appears when the block has ended without an error."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield file


def text_lines(table: pa.Table) -> Iterator[str]:
    """The rows of a table as lines."""
    joined = pc.binary_join_element_wise(*map(_cells, table.columns), "\t")
    return (f"{line}\n" for line in joined.to_pylist())


def _cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers and missing values as they are written; string (n,)."""
    if pa.types.is_floating(column.type):
        numbers = (None if value is None else f"{value:.6f}" for value in column.to_pylist())
        return pa.chunked_array([pa.array(numbers, pa.string())]).fill_null(NOT_AVAILABLE)
    return column.cast(pa.string()).fill_null(NOT_AVAILABLE)
