"""Chunking and translation against a slow oracle that says the rules one by one."""

import gzip
import re
from io import StringIO
from math import ceil, floor
from pathlib import Path

import numpy as np
import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.chunking import chunk_table
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.translation import FRAME_NAMES, open_frames

chunk_lengths = st.one_of(st.sampled_from([300, 500]), st.integers(1, 60))
clean = st.text("ACGT", min_size=1, max_size=200)
stopless = st.lists(st.sampled_from(["GCC", "GGC", "AAA", "CCC", "GCN", "AC"]), min_size=1, max_size=60)
odd = st.text("ACGTNRYSWKMBDHVX-", min_size=1, max_size=120)
sequences = st.one_of(clean, odd, stopless.map("".join))


def slow_chunks(length: int, k: int) -> list[tuple[int, int]]:
    n = ceil(length / k)
    r = n * k - length
    base = floor(r / n)
    up = r - base * (n - 1)
    overlaps = ([base + 1] * up + [base] * (n - 1 - up) + [0])[:n]
    starts = [i * k - sum(overlaps[:i]) for i in range(n)]
    return [(start, min(length, start + k)) for start in starts]


def slow_frames(chunk: str) -> list[tuple[str, str, str]]:
    """(frame, nucleotide, protein) of the open frames of a chunk."""
    complement = str.maketrans("ACGT", "TGCA")
    found = []
    for direction, strand in (("F", chunk), ("R", chunk[::-1].translate(complement))):
        for f in range(3):
            codons = [strand[i : i + 3] for i in range(f, len(strand) - 2, 3)]
            pure = "".join(codon for codon in codons if set(codon) <= set("ACGT"))
            protein = str(Seq(pure).translate())
            if protein and "*" not in protein:
                found.append((f"{direction}{f + 1}", strand[f : f + 1 + 3 * len(protein)], protein))
    return found


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), chunk_lengths)
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


@given(st.lists(sequences, min_size=1, max_size=6), chunk_lengths)
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
    found = zip(
        frames.chunk.tolist(), names, frames.dna.to_strings(), frames.protein.to_strings(), strict=True
    )
    assert list(found) == expected


@given(clean)
def test_the_other_strand_has_the_same_frames_with_directions_swapped(sequence: str) -> None:
    def proteins(text: str) -> dict[str, str]:
        data = np.frombuffer(text.encode(), np.uint8)
        frames = open_frames(data, np.array([0]), np.array([len(text)]))
        names = [FRAME_NAMES[number] for number in frames.frame]
        return dict(zip(names, frames.protein.to_strings(), strict=True))

    swapped = {name.translate(str.maketrans("FR", "RF")): one for name, one in proteins(sequence).items()}
    assert proteins(str(Seq(sequence).reverse_complement())) == swapped


@pytest.mark.parametrize(
    "name",
    [
        "iupac.fa",
        "lower_case.fa",
        "n_runs.fa",
        "no_final_newline.fa",
        "plain.fa.gz",
        "real_orchids_iupac.fasta",
        "real_short_25bp.fasta",
        "rna_u.fa",
        "short_and_border.fa",
        "uneven_wrap.fa",
        "windows_crlf.fa",
        "fastq_given.fq",
    ],
)
@pytest.mark.parametrize("k", [300, 500])
def test_hard_files_follow_the_rule(shared_dir: Path, tmp_path: Path, name: str, k: int) -> None:
    path = shared_dir / "data" / "hard" / name
    content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    expected = []
    for record in SeqIO.parse(StringIO(content.decode()), "fastq" if name.endswith(".fq") else "fasta"):
        sequence = re.sub(r"\s", "", str(record.seq)).upper().replace("U", "T")
        for index, (start, end) in enumerate(slow_chunks(len(sequence), k), 1):
            for frame, dna, protein in slow_frames(sequence[start:end]):
                expected.append(f"{record.id}_chunk_{index}{frame}\t{dna}\t{protein}")

    write_frames_tsv(build_frame_store([path], tmp_path / "frames", k), tmp_path / "frames.tsv")
    assert (tmp_path / "frames.tsv").read_text().splitlines()[1:] == expected
