"""Sorting in pieces is sorting."""

import random
from pathlib import Path

import pytest

from virnuc_core.results.sorted_lines import SortedLines


@pytest.mark.parametrize("lines_at_once", [1, 3, 100, 1000])
def test_order_is_by_code_points_of_the_first_column(tmp_path: Path, lines_at_once: int) -> None:
    names = ["a", "a!", "a_chunk_10", "a_chunk_2", "B", "ä", "z", "𝄞", "￿", ""]
    names += [f"x{i}" for i in range(90)]
    lines = [f"{name}\t{number}\n" for number, name in enumerate(names)]
    random.Random(1).shuffle(lines)
    with SortedLines(tmp_path, lines_at_once) as collected:
        collected.extend(lines[:50])
        collected.extend(iter(lines[50:]))
        result = list(collected)
    assert [line.split("\t")[0] for line in result] == sorted(names)
    assert sorted(result) == sorted(lines)
    assert list(tmp_path.iterdir()) == []


def test_nothing(tmp_path: Path) -> None:
    with SortedLines(tmp_path) as collected:
        assert list(collected) == []
