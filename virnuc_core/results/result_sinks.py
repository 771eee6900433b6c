"""Where the tables of a run go: into its result files, each of which appears when it is complete."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol

import pyarrow as pa

from virnuc_core.results.parquet_table import ParquetTable, open_parquet
from virnuc_core.results.sorted_lines import SortedLines
from virnuc_core.results.text_table import open_gzip, open_text


class Lines(Protocol):
    """Takes lines in any order."""

    def extend(self, lines: Iterable[str]) -> None:
        """Adds lines, each with its line end."""


class Content(Protocol):
    """Takes bytes in order."""

    def write(self, content: bytes, /) -> int:
        """Adds bytes."""


class ResultSinks(Protocol):
    """Opens result files by their paths; a `with` block takes the content of one."""

    def text(self, path: Path) -> AbstractContextManager[IO[str]]:
        """A text file."""

    def gzip(self, path: Path) -> AbstractContextManager[Content]:
        """A file compressed with gzip; it takes what is to be compressed."""

    def parquet(self, path: Path, schema: pa.Schema) -> AbstractContextManager[ParquetTable]:
        """A Parquet file."""

    def sorted_text(self, path: Path, header: str) -> AbstractContextManager[Lines]:
        """A text file of a header and lines ordered by their first column, by code points."""


class WritingSinks:
    """Writes the files."""

    def text(self, path: Path) -> AbstractContextManager[IO[str]]:
        """See `ResultSinks`."""
        return open_text(path)

    def gzip(self, path: Path) -> AbstractContextManager[Content]:
        """See `ResultSinks`."""
        return open_gzip(path)

    def parquet(self, path: Path, schema: pa.Schema) -> AbstractContextManager[ParquetTable]:
        """See `ResultSinks`."""
        return open_parquet(path, schema)

    @contextmanager
    def sorted_text(self, path: Path, header: str) -> Iterator[Lines]:
        """See `ResultSinks`."""
        with SortedLines(path.parent) as lines, open_text(path) as file:
            yield lines
            file.write(header)
            file.writelines(lines)
