"""Chunking and translation against a slow oracle; tests/golden/test_frames.py shows that they are VirNucPro's."""

from collections.abc import Callable

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.slow_frames import slow_chunks, slow_frames, slow_orfs
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frames import FRAME_NAMES, FrameTable, chunk_table, longest_orfs, open_frames
from virnuc_core.specs import CHUNKS_BY_RECORD

CHUNK_LENGTHS = st.sampled_from([300, 500]) | st.integers(1, 60)
CLEAN = st.text("ACGT", min_size=1, max_size=200)
STOPLESS = st.lists(st.sampled_from(["GCC", "GGC", "AAA", "CCC", "GCN", "AC"]), min_size=1, max_size=60)
GENES = st.lists(st.sampled_from(["GCC", "TAA", "GGC", "CTAG", "N"]), min_size=1, max_size=150).map("".join)
ODD = st.text("ACGTNRYSWKMBDHVX-", min_size=1, max_size=120)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), CHUNK_LENGTHS)
@example([1, 499, 500, 501, 999, 1000, 1001, 1200], 500)
def test_chunks_follow_the_rule(lengths: list[int], k: int) -> None:
    table = chunk_table(np.array(lengths, np.int64), k)
    expected = [
        (record, index, start, end)
        for record, length in enumerate(lengths)
        for index, (start, end) in enumerate(slow_chunks(length, k))
    ]
    found = zip(table.record, table.index, table.start, table.end, strict=True)
    assert [tuple(map(int, row)) for row in found] == expected


LENGTHS_AROUND_STEPS = st.sampled_from([1999, 2000, 2001]) | st.integers(1, 12_000)


@given(st.lists(LENGTHS_AROUND_STEPS, min_size=1, max_size=20))
@example([1, 1999, 2000, 4999, 5000, 30_000])
def test_records_are_cut_by_their_own_length(lengths: list[int]) -> None:
    table = chunk_table(np.array(lengths, np.int64), CHUNKS_BY_RECORD)
    rows = list(zip(table.record, table.index, table.start, table.end, strict=True))
    for record, length in enumerate(lengths):
        own = [(int(start), int(end)) for number, _, start, end in rows if number == record]
        assert own == slow_chunks(length, 500 if length < 2000 else 1000)
        assert {base for start, end in own for base in range(start, end)} == set(range(length))
    assert table.record.tolist() == sorted(table.record.tolist())


def require_rows(
    strings: list[str],
    k: int,
    find: Callable[..., FrameTable],
    slow: Callable[[str], list[tuple[str, int, str, str]]],
) -> None:
    """Requires the rows of the oracle `slow`, for the chunks of these records."""
    column = ByteColumn.from_strings(strings)
    table = chunk_table(column.lengths, k)
    offset = column.offsets[table.record]
    rows = find(column.data, offset + table.start, offset + table.end)
    expected = [
        (chunk, *row)
        for chunk, (record, start, end) in enumerate(zip(table.record, table.start, table.end, strict=True))
        for row in slow(strings[record][start:end])
    ]
    names = [FRAME_NAMES[number] for number in rows.frame]
    columns = (rows.start.tolist(), rows.dna.to_strings(), rows.protein.to_strings())
    assert list(zip(rows.chunk.tolist(), names, *columns, strict=True)) == expected


@given(st.lists(CLEAN | ODD | STOPLESS.map("".join), min_size=1, max_size=6), CHUNK_LENGTHS)
@example(["GCCTAAGCC", "GCCTAGGCC", "GCCTGAGCC", "GCCGCCAC", "GCCNAAGGCCCC", "RCCGGC", "A", "AC"], 500)
def test_frames_follow_the_rule(strings: list[str], k: int) -> None:
    require_rows(strings, k, open_frames, slow_frames)


@given(st.lists(CLEAN | ODD | GENES, min_size=1, max_size=6), CHUNK_LENGTHS)
@example(["GCC" * 10 + "TAA" + "GCC" * 10, "GCC" * 9 + "GC", "GCC" * 10 + "N" * 500 + "GCA" * 12], 500)
@example([("GCC" * codons + "TAG" + "CTAG" * 12)[:100] for codons in (17, 18, 19)], 500)
def test_longest_orfs_follow_the_rule(strings: list[str], k: int) -> None:
    require_rows(strings, k, longest_orfs, slow_orfs)
