"""Result files do not depend on how their content is split."""

import gzip
import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.results.writers import (
    SortedRows,
    decimals,
    open_parquet,
    open_sorted_lines,
    open_stream,
    shortest_digits,
    table_lines,
)

SCHEMA = pa.schema([("name", pa.string()), ("p", pa.float64())])
NAMES = ["a", "a!", "a_chunk_10", "a_chunk_2", "B", "ä", "z", "𝄞", "￿", "", *(f"x{i}" for i in range(90))]
FILES = ("text", "text.gz", "parquet", "sorted")


def shuffled(seed: int) -> pa.Table:
    """A row per name, in random order."""
    order = random.Random(seed).sample(range(len(NAMES)), len(NAMES))
    return pa.table({"id": [NAMES[n] for n in order], "number": [str(n) for n in order]})


def rows(begin: int, end: int) -> pa.Table:
    names = [f"contig{n % 7}" for n in range(begin, end)]
    values = [None if n % 5 == 0 else n / 9 for n in range(begin, end)]
    return pa.table({"name": names, "p": values}, SCHEMA)


def write_all(folder: Path, step: int) -> None:
    """Writes the same four files piecewise."""
    folder.mkdir(exist_ok=True)
    with (
        open_stream(folder / "text") as write,
        open_stream(folder / "text.gz", compress=True, block_bytes=64) as write_compressed,
        open_parquet(folder / "parquet", SCHEMA, 100) as append,
        open_sorted_lines(folder / "sorted", b"id\tnumber\n") as append_unsorted,
    ):
        for begin in range(0, 250, step):
            end = min(begin + step, 250)
            content = b"".join(b"%d\n" % n for n in range(begin, end))
            write(content)
            write_compressed(content)
            append(rows(begin, end))
            append_unsorted(shuffled(step).slice(begin, end - begin))


@pytest.mark.parametrize("step", [1, 30, 100])
def test_content_in_pieces_of_any_size(step: int, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    write_all(whole, 250)
    write_all(pieces, step)
    assert {path.name for path in pieces.iterdir()} == set(FILES)
    assert all((pieces / name).read_bytes() == (whole / name).read_bytes() for name in FILES)
    assert gzip.decompress((pieces / "text.gz").read_bytes()) == (pieces / "text").read_bytes()
    file = pq.ParquetFile(pieces / "parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [100, 100, 50]
    assert file.read().equals(rows(0, 250))


@pytest.mark.parametrize("in_memory", [1, 300, 1 << 20])
@pytest.mark.parametrize("merged_rows", [1, 3, 1000])
def test_order_is_by_code_points_of_the_first_column(in_memory: int, merged_rows: int) -> None:
    rows = shuffled(1)
    with tempfile.TemporaryFile() as spilled:
        collected = SortedRows(spilled, in_memory, merged_rows)
        for begin in range(0, len(rows), 10):
            collected.append(rows.slice(begin, 10))
        result = pa.concat_tables(collected)
    assert result["id"].to_pylist() == sorted(NAMES)
    assert result.sort_by("number").equals(rows.sort_by("number"))


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    for opened in (
        open_parquet(path, SCHEMA),
        open_stream(path),
        open_stream(path, compress=True),
        open_sorted_lines(path, b""),
    ):
        with pytest.raises((TypeError, AttributeError)), opened as write:
            write(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
MIDWAY = st.integers(-(10**7), 10**7).map(lambda number: (number + 0.5) / 1e6)


@given(st.lists(st.floats(-2, 2) | MIDWAY | FINITE), st.sampled_from([2, 6]))
@example([0.0, -0.0, -1e-9, 0.5e-6, 1 / 128, 3 / 128, 0.125, -0.375, 9.9999995, 1e22, -1e12], 6)
def test_decimals_are_those_of_python(values: list[float], places: int) -> None:
    expected = [f"{value:.{places}f}" for value in values]
    assert decimals(np.array(values, np.float64), places).to_pylist() == expected


@given(st.lists(st.floats(0, 1, width=32) | st.floats(0, 2**-13, width=32) | st.floats(width=32)))
@example([0.0, 1.0, 1e-4, 9.9e-5, 1e-8, 1.0000001e-4, 0.99999994, 123.0, 1e16, -0.5])
def test_digits_are_those_of_str(values: list[float]) -> None:
    numbers = np.array(values, np.float32)
    assert shortest_digits(numbers).to_pylist() == [str(number) for number in numbers]


def test_lines_do_not_depend_on_how_many_are_joined() -> None:
    table = rows(0, 50)
    text = table_lines(table)
    names, values = (table[name].to_pylist() for name in ("name", "p"))
    cells = ["NA" if value is None else f"{value:.6f}" for value in values]
    expected = (f"{name}\t{cell}\n" for name, cell in zip(names, cells, strict=True))
    assert text.decode() == "".join(expected)
    assert table_lines(table.slice(7, 0)) == b""
    for size in (1, 7):
        assert table_lines(pa.concat_tables([table.slice(0, 20), table.slice(20)]), size) == text
