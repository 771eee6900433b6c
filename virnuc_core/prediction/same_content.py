"""Whether two result files say the same."""

import filecmp
import gzip
import zlib
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

_PIECE_BYTES: Final = 1 << 20


def same_content(found: Path, expected: Path) -> bool:
    """Compares the bytes of two files, or else what was compressed: other versions of zlib and pyarrow write other bytes.

    Args:
        found: a file that may be damaged.
        expected: one that is not.
    """
    if found.suffix == ".gz":
        return _same_gzip(found, expected)
    if found.suffix == ".parquet":
        return _same_parquet(found, expected)
    return filecmp.cmp(found, expected, shallow=False)


def _same_gzip(found: Path, expected: Path) -> bool:
    with gzip.open(found) as left, gzip.open(expected) as right:
        while True:
            try:
                piece = left.read(_PIECE_BYTES)
            except (gzip.BadGzipFile, EOFError, zlib.error):
                return False
            if piece != right.read(_PIECE_BYTES):
                return False
            if not piece:
                return True


def _same_parquet(found: Path, expected: Path) -> bool:
    try:
        with pq.ParquetFile(found) as left, pq.ParquetFile(expected) as right:
            if left.schema_arrow != right.schema_arrow or left.num_row_groups != right.num_row_groups:
                return False
            return all(
                left.read_row_group(group).equals(right.read_row_group(group))
                for group in range(left.num_row_groups)
            )
    except (pa.ArrowException, OSError):  # OSError is also how pyarrow names what it cannot parse
        return False
