import numpy as np
import pytest

from virnuc_core.errors import UsageError
from virnuc_core.sequences.chunking import chunk_table


def chunks(length: int, chunk_length: int) -> list[tuple[int, int]]:
    table = chunk_table(np.array([length]), chunk_length)
    return list(zip(table.start.tolist(), table.end.tolist(), strict=True))


@pytest.mark.parametrize("length", [1, 2, 499, 500])
def test_a_record_up_to_the_chunk_length_is_one_chunk(length: int) -> None:
    assert chunks(length, 500) == [(0, length)]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (501, [(0, 500), (250, 501)]),
        (999, [(0, 500), (499, 999)]),
        (1000, [(0, 500), (500, 1000)]),
        (1001, [(0, 500), (333, 833), (666, 1001)]),
        (1200, [(0, 500), (399, 899), (798, 1200)]),
    ],
)
def test_chunks_overlap_and_the_last_may_be_shorter(length: int, expected: list[tuple[int, int]]) -> None:
    assert chunks(length, 500) == expected


def test_rows_are_in_order_of_record_and_position() -> None:
    table = chunk_table(np.array([700, 10, 1500]), 500)
    assert table.record.tolist() == [0, 0, 1, 2, 2, 2]
    assert table.index.tolist() == [0, 1, 0, 0, 1, 2]
    assert len(table) == 6


def test_no_records_give_no_chunks() -> None:
    assert len(chunk_table(np.empty(0, np.int64), 500)) == 0


def test_a_chunk_length_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="0 bp"):
        chunk_table(np.array([10]), 0)
