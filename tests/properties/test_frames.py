"""Chunking and translation against a slow oracle; tests/golden/test_frames.py shows that they are VirNucPro's."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.slow_frames import slow_chunks, slow_frames, slow_stretches
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frames import FRAME_NAMES, chunk_table, longest_stretches, open_frames

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


@given(st.lists(CLEAN | ODD | STOPLESS.map("".join), min_size=1, max_size=6), CHUNK_LENGTHS)
@example(["GCCTAAGCC", "GCCTAGGCC", "GCCTGAGCC", "GCCGCCAC", "GCCNAAGGCCCC", "RCCGGC", "A", "AC"], 500)
def test_frames_follow_the_rule(strings: list[str], k: int) -> None:
    column = ByteColumn.from_strings(strings)
    table = chunk_table(column.lengths, k)
    offset = column.offsets[table.record]
    frames = open_frames(column.data, offset + table.start, offset + table.end)
    expected = [
        (chunk, *frame)
        for chunk, (record, start, end) in enumerate(zip(table.record, table.start, table.end, strict=True))
        for frame in slow_frames(strings[record][start:end])
    ]
    names = [FRAME_NAMES[number] for number in frames.frame]
    strings_of = (frames.dna.to_strings(), frames.protein.to_strings())
    assert list(zip(frames.chunk.tolist(), names, *strings_of, strict=True)) == expected


@given(st.lists(CLEAN | ODD | GENES, min_size=1, max_size=6), CHUNK_LENGTHS)
@example(["GCC" * 10 + "TAA" + "GCC" * 10, "GCC" * 9 + "GC", "GCC" * 10 + "N" * 500 + "GCA" * 12], 500)
def test_longest_stretches_follow_the_rule(strings: list[str], k: int) -> None:
    column = ByteColumn.from_strings(strings)
    table = chunk_table(column.lengths, k)
    offset = column.offsets[table.record]
    stretches = longest_stretches(column.data, offset + table.start, offset + table.end)
    expected = [
        (chunk, *stretch)
        for chunk, (record, start, end) in enumerate(zip(table.record, table.start, table.end, strict=True))
        for stretch in slow_stretches(strings[record][start:end])
    ]
    names = [FRAME_NAMES[number] for number in stretches.frame]
    columns = (stretches.start.tolist(), stretches.dna.to_strings(), stretches.protein.to_strings())
    assert list(zip(stretches.chunk.tolist(), names, *columns, strict=True)) == expected
