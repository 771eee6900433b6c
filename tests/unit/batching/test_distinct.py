"""Equal strings are found, and different ones are never taken for equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.batching import distinct
from virnuc_core.batching.distinct import distinct_rows
from virnuc_core.columns import ByteColumn


@given(st.lists(st.text("AC\x00", max_size=20)), st.text("ACG", max_size=9))
def test_like_a_dictionary(strings: list[str], before: str) -> None:
    column = ByteColumn.from_strings([before, *strings, "more"]).rows(1, 1 + len(strings))
    first = {}
    for row, string in enumerate(strings):
        first.setdefault(string, row)
    rows, equal_to = distinct_rows(column)
    assert rows.tolist() == list(first.values())
    assert rows[equal_to].tolist() == [first[string] for string in strings]


@pytest.mark.parametrize("length", [3, 64, 1000])
def test_many_of_one_length(length: int) -> None:
    letters = np.frombuffer(b"ACGT", np.uint8)[np.random.default_rng(0).integers(4, size=length * 500)]
    column = ByteColumn(np.tile(letters, 3), np.arange(1501) * length)
    strings = column.to_strings()
    rows, equal_to = distinct_rows(column)
    assert len(rows) == len(set(strings))
    assert [strings[row] for row in rows[equal_to]] == strings


def test_rows_with_the_same_hash_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        distinct, "_hashes", lambda words, offsets, lengths: np.zeros(len(lengths), np.uint64)
    )
    column = ByteColumn.from_strings(["AAAA", "CCCCCCCCCCCC", "AAAA", "", "CCCCCCCCCCCC"])
    rows, equal_to = distinct_rows(column)
    assert rows.tolist() == [0, 1, 3, 4]
    assert equal_to.tolist() == [0, 1, 0, 2, 3]
