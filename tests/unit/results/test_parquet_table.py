"""Parquet files do not depend on how many rows come at once."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from virnuc_core.results import parquet_table
from virnuc_core.results.parquet_table import open_parquet

SCHEMA = pa.schema([("name", pa.string()), ("p", pa.float64())])


def rows(begin: int, end: int) -> pa.Table:
    numbers = range(begin, end)
    columns = {
        "name": [f"contig{n % 7}" for n in numbers],
        "p": [None if n % 5 == 0 else n / 9 for n in numbers],
    }
    return pa.table(columns, SCHEMA)


@pytest.mark.parametrize("size", [1, 30, 100, 250, 1000])
def test_rows_in_pieces_of_any_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_table, "GROUP_ROWS", 100)
    for name, step in (("whole", 250), ("pieces", size)):
        with open_parquet(tmp_path / name, SCHEMA) as table:
            for begin in range(0, 250, step):
                table.append(rows(begin, min(begin + step, 250)))
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    file = pq.ParquetFile(tmp_path / "pieces")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [100, 100, 50]
    assert file.read().equals(rows(0, 250))


def test_no_rows(tmp_path: Path) -> None:
    with open_parquet(tmp_path / "empty", SCHEMA):
        pass
    assert pq.read_table(tmp_path / "empty").equals(SCHEMA.empty_table())


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowException), open_parquet(tmp_path / "broken", SCHEMA) as table:
        table.append(pa.table({"other": [1]}))
    assert list(tmp_path.iterdir()) == []
