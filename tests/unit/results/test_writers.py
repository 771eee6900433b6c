"""Result files do not depend on how their content is split, and are compared without being written."""

import gzip
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.results import writers
from virnuc_core.results.writers import ResultComparison, ResultWriter, SortedLines, six_decimals

SCHEMA = pa.schema([("name", pa.string()), ("p", pa.float64())])
NAMES = ["a", "a!", "a_chunk_10", "a_chunk_2", "B", "ä", "z", "𝄞", "￿", "", *(f"x{i}" for i in range(90))]
FILES = ("text", "text.gz", "parquet", "sorted")


def lines(seed: int) -> list[bytes]:
    """One per name, in random order."""
    made = [f"{name}\t{number}\n".encode() for number, name in enumerate(NAMES)]
    random.Random(seed).shuffle(made)
    return made


def rows(begin: int, end: int) -> pa.Table:
    names = [f"contig{n % 7}" for n in range(begin, end)]
    values = [None if n % 5 == 0 else n / 9 for n in range(begin, end)]
    return pa.table({"name": names, "p": values}, SCHEMA)


def write_all(writer: ResultWriter, folder: Path, step: int) -> None:
    """Writes, or compares, the same four files piecewise."""
    folder.mkdir(exist_ok=True)
    with (
        writer.stream(folder / "text") as write,
        writer.stream(folder / "text.gz", compress=True) as write_compressed,
        writer.parquet(folder / "parquet", SCHEMA) as append,
        writer.sorted_lines(folder / "sorted", b"id\tnumber\n") as add,
    ):
        for begin in range(0, 250, step):
            end = min(begin + step, 250)
            content = b"".join(b"%d\n" % n for n in range(begin, end))
            write(content)
            write_compressed(content)
            append(rows(begin, end))
            add(lines(step)[begin:end])


@pytest.mark.parametrize("step", [1, 30, 100])
def test_content_in_pieces_of_any_size(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "ROW_GROUP_ROWS", 100)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    write_all(ResultWriter(), whole, 250)
    write_all(ResultWriter(), pieces, step)
    assert {path.name for path in pieces.iterdir()} == set(FILES)
    assert all((pieces / name).read_bytes() == (whole / name).read_bytes() for name in FILES)
    assert gzip.decompress((pieces / "text.gz").read_bytes()) == (pieces / "text").read_bytes()
    file = pq.ParquetFile(pieces / "parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [100, 100, 50]
    assert file.read().equals(rows(0, 250))
    comparison = ResultComparison()
    write_all(comparison, pieces, 7)
    assert comparison.differing == set()


@pytest.mark.parametrize("in_memory", [1, 3, 1000])
def test_order_is_by_code_points_of_the_first_column(in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_READ_BYTES", 20)
    with tempfile.TemporaryFile() as spilled:
        collected = SortedLines(spilled, in_memory)
        collected.extend(lines(1)[:50])
        collected.extend(iter(lines(1)[50:]))
        result = list(collected)
    assert [line.decode().split("\t")[0] for line in result] == sorted(NAMES)
    assert sorted(result) == sorted(lines(1))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:30] + b"?" + b[31:], lambda b: b""]
)
@pytest.mark.parametrize("name", FILES)
def test_a_differing_file_is_named(name: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write_all(ResultWriter(), tmp_path, 250)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    comparison = ResultComparison()
    write_all(comparison, tmp_path, 250)
    assert comparison.differing == {path}


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    writer, path = ResultWriter(), tmp_path / "broken"
    for opened in (
        writer.parquet(path, SCHEMA),
        writer.stream(path),
        writer.stream(path, compress=True),
        writer.sorted_lines(path, b""),
    ):
        with pytest.raises((TypeError, AttributeError)), opened as write:
            write(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@given(st.floats(0, 1) | st.floats(0.499999, 0.500001), st.just(0.5) | st.floats(0.001, 0.999))
@example(0.12345672, 0.1234567)
@example(0.1234563, 0.1234562)
@example(0.9999997, 0.9999999)
def test_what_is_read_is_on_the_side_of_what_was_written(value: float, threshold: float) -> None:
    text = six_decimals(value, threshold)
    assert (float(text) >= threshold) == (value >= threshold)
    assert abs(float(text) - value) < 1.01e-6
    assert len(text) == 8


def test_numbers_are_rounded() -> None:
    values = [0.4999997, 0.5, 0.50000001, 0.1234565001, 1.0]
    texts = ["0.499999", "0.500000", "0.500000", "0.123457", "1.000000"]
    assert [six_decimals(value, 0.5) for value in values] == texts
