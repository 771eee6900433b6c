"""The tables of a run compared with its result files as they are made: nothing is written, and memory is bounded."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq

from virnuc_core.results.parquet_table import ParquetTable

_BUFFER_BYTES: Final = 1 << 20


class ComparingSinks:
    """Compares instead of writing; of compressed files the content, since other versions of zlib and pyarrow write other bytes.

    Attributes:
        differing: files that are not what was made, missing ones among them.
    """

    def __init__(self) -> None:
        self.differing: set[Path] = set()

    @contextmanager
    def text(self, path: Path) -> Iterator[IO[str]]:
        """See `ResultSinks`."""
        with (
            self._content(path, lambda: path.open("rb")) as expected,
            io.TextIOWrapper(expected, encoding="utf-8", newline="\n") as text,
        ):
            yield text

    @contextmanager
    def gzip(self, path: Path) -> Iterator[BinaryIO]:
        """See `ResultSinks`."""
        with self._content(path, lambda: cast(BinaryIO, gzip.open(path))) as expected:
            yield expected

    @contextmanager
    def parquet(self, path: Path, schema: pa.Schema) -> Iterator[ParquetTable]:
        """See `ResultSinks`."""
        try:
            found = pq.ParquetFile(path)
        except (pa.ArrowException, OSError):  # OSError is also how pyarrow names what it cannot parse
            self.differing.add(path)
            yield ParquetTable(_Unread(), schema)
            return
        with found:
            groups = _ComparedGroups(found)
            table = ParquetTable(groups, schema)
            yield table
            table.finish()
            if groups.differs or found.schema_arrow != schema or groups.number != found.num_row_groups:
                self.differing.add(path)

    @contextmanager
    def sorted_text(self, path: Path, header: str) -> Iterator["_LineSum"]:
        """See `ResultSinks`."""
        expected = _LineSum()
        yield expected
        if not path.exists() or not expected.is_of(path, header):
            self.differing.add(path)

    @contextmanager
    def _content(self, path: Path, open_found: Callable[[], BinaryIO]) -> Iterator[BinaryIO]:
        with open_found() if path.exists() else io.BytesIO() as found:
            compared = _ComparedBytes(found)
            with io.BufferedWriter(compared, _BUFFER_BYTES) as expected:
                yield cast(BinaryIO, expected)
            if compared.differs or compared.read_found(1):
                self.differing.add(path)


class _ComparedBytes(io.RawIOBase):
    """Takes the bytes that a file should hold.

    Attributes:
        differs: whether the file has been found to hold others.
    """

    def __init__(self, found: BinaryIO) -> None:
        self.differs = False
        self._found = found

    def writable(self) -> bool:
        return True

    def write(self, expected: Any) -> int:
        content = bytes(expected)
        if not self.differs:
            self.differs = self.read_found(len(content)) != content
        return len(content)

    def read_found(self, number: int) -> bytes | None:
        """The next bytes of the file; None where it cannot be decompressed."""
        try:
            return self._found.read(number)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            self.differs = True
            return None


class _ComparedGroups:
    """Takes the row groups that a Parquet file should hold.

    Attributes:
        number: how many there have been.
        differs: whether the file has been found to hold others.
    """

    def __init__(self, found: pq.ParquetFile) -> None:
        self.number = 0
        self.differs = False
        self._found = found

    def write_table(self, rows: pa.Table, row_group_size: int) -> None:
        self.differs = self.differs or not self._is_next(rows)
        self.number += 1

    def _is_next(self, rows: pa.Table) -> bool:
        try:
            return self.number < self._found.num_row_groups and bool(
                self._found.read_row_group(self.number).equals(rows)
            )
        except (pa.ArrowException, OSError):
            return False


class _Unread:
    """Takes row groups that there is nothing to compare with."""

    def write_table(self, rows: pa.Table, row_group_size: int) -> None:
        pass


class _LineSum:
    """The sum of the digests of lines, which does not depend on their order: nothing has to be sorted."""

    def __init__(self) -> None:
        self._sum = 0

    def extend(self, lines: Iterable[str]) -> None:
        """Adds lines, each with its line end."""
        self._sum += sum(_digest(line.encode()) for line in lines)

    def is_of(self, path: Path, header: str) -> bool:
        """Whether a file has these lines after its header, ordered by their first column."""
        total, before = 0, b""
        with path.open("rb") as lines:
            if next(lines, b"") != header.encode():
                return False
            for line in lines:
                name = line.partition(b"\t")[0]
                if name < before:
                    return False
                before = name
                total += _digest(line)
        return total == self._sum


def _digest(line: bytes) -> int:
    return int.from_bytes(blake2b(line, digest_size=32).digest())
