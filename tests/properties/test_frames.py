"""Chunking and translation against a slow oracle; tests/golden/test_frames.py shows that they are VirNucPro's."""

from pathlib import Path

import numpy as np
import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from hypothesis import example, given
from hypothesis import strategies as st

from tests.slow_frames import slow_chunks, slow_frames
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.frames import FRAME_NAMES, chunk_table, open_frames

CHUNK_LENGTHS = st.sampled_from([300, 500]) | st.integers(1, 60)
CLEAN = st.text("ACGT", min_size=1, max_size=200)
STOPLESS = st.lists(st.sampled_from(["GCC", "GGC", "AAA", "CCC", "GCN", "AC"]), min_size=1, max_size=60)
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


@given(st.integers(1, 100_000), st.integers(1, 1000))
def test_chunks_cover_the_record_without_a_gap(length: int, k: int) -> None:
    table = chunk_table(np.array([length]), k)
    assert table.start[0] == 0
    assert table.end[-1] == length
    assert (table.end > table.start).all()
    assert (table.end - table.start <= k).all()
    assert (table.start[1:] <= table.end[:-1]).all()
    assert (np.diff(table.start) > 0).all()


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


@given(CLEAN)
def test_the_other_strand_has_the_same_frames_with_directions_swapped(sequence: str) -> None:
    def proteins(text: str) -> dict[str, str]:
        data = np.frombuffer(text.encode(), np.uint8)
        frames = open_frames(data, np.array([0]), np.array([len(text)]))
        names = [FRAME_NAMES[number] for number in frames.frame]
        return dict(zip(names, frames.protein.to_strings(), strict=True))

    swapped = {name.translate(str.maketrans("FR", "RF")): one for name, one in proteins(sequence).items()}
    assert proteins(str(Seq(sequence).reverse_complement())) == swapped


@pytest.mark.parametrize("name", ["real_orchids_iupac.fasta", "real_short_25bp.fasta", "fastq_given.fq"])
def test_frames_of_real_files_follow_the_rule(shared_dir: Path, tmp_path: Path, name: str) -> None:
    path = shared_dir / "data" / "hard" / name
    expected = []
    for record in SeqIO.parse(path, "fastq" if name.endswith(".fq") else "fasta"):
        sequence = str(record.seq).upper()
        for index, (start, end) in enumerate(slow_chunks(len(sequence), 500), 1):
            for frame, dna, protein in slow_frames(sequence[start:end]):
                expected.append(f"{record.id}_chunk_{index}{frame}\t{dna}\t{protein}")
    write_frames_tsv(build_frame_store([path], tmp_path / "frames", 500), tmp_path / "frames.tsv")
    assert (tmp_path / "frames.tsv").read_text().splitlines()[1:] == expected
