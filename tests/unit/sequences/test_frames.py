import numpy as np
import pytest

from virnuc_core.errors import UsageError
from virnuc_core.sequences.frames import (
    DNA_ALONE,
    FRAME_NAMES,
    LEAST_BASES,
    FrameTable,
    chunk_table,
    open_frames,
    with_closed_chunks,
)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(0, 1)]),
        (500, [(0, 500)]),
        (501, [(0, 500), (250, 501)]),
        (999, [(0, 500), (499, 999)]),
        (1001, [(0, 500), (333, 833), (666, 1001)]),
        (1200, [(0, 500), (399, 899), (798, 1200)]),
    ],
)
def test_chunks_overlap_and_the_last_may_be_shorter(length: int, expected: list[tuple[int, int]]) -> None:
    table = chunk_table(np.array([length]), 500)
    assert list(zip(table.start.tolist(), table.end.tolist(), strict=True)) == expected


def test_a_chunk_length_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="0 bp"):
        chunk_table(np.array([10]), 0)


def layout(*chunks: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.cumsum([len(chunk) for chunk in chunks])
    starts = ends - [len(chunk) for chunk in chunks]
    return np.frombuffer("".join(chunks).encode(), np.uint8), starts, ends


def named(table: FrameTable) -> dict[str, tuple[str, str]]:
    names = [FRAME_NAMES[number] for number in table.frame]
    values = zip(table.dna.to_strings(), table.protein.to_strings(), strict=True)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("chunk", "frame", "expected"),
    [
        ("GCCGCCA", "F1", ("GCCGCCA", "AA")),
        ("GCCGCCAC", "F1", ("GCCGCCA", "AA")),
        ("GCCGCC", "F1", ("GCCGCC", "AA")),
        ("GCCNAAGGCCCC", "F1", ("GCCNAAGGCC", "AGP")),  # a dropped codon shortens the slice
        ("RCCGGC", "R1", ("GCCG", "A")),  # only A, C, G and T are complemented
        *(("GCC" + stop + "GCC", "F1", None) for stop in ("TAA", "TAG", "TGA")),
        *((chunk, "F1", None) for chunk in ("A", "AC", "NNNNNNNNN", "TAAN")),
    ],
)
def test_a_frame_of_one_chunk(chunk: str, frame: str, expected: tuple[str, str] | None) -> None:
    assert named(open_frames(*layout(chunk))).get(frame) == expected


def test_frames_do_not_cross_the_border_of_a_chunk() -> None:
    table = open_frames(*layout("GC", "CGCC", "GCCA"))
    assert table.chunk.tolist() == sorted(table.chunk.tolist())
    assert 0 not in table.chunk
    assert all(len(protein) == 1 for protein in table.protein.to_strings())


def test_a_chunk_without_an_open_frame_needs_bases_for_a_dna_only_score() -> None:
    stops = "TTAATTAACTAGCTAG" * 4
    enough, too_few = stops[:LEAST_BASES] + "N" * 450, stops[: LEAST_BASES - 1] + "R" * 450
    chunks = layout("N" * 500, enough, "GCC" * 40, too_few, stops)
    frames = open_frames(*chunks)
    table = with_closed_chunks(frames, *chunks)
    is_alone = table.frame == DNA_ALONE
    assert table.chunk[is_alone].tolist() == [1, 4]
    assert table.take(np.flatnonzero(is_alone)).dna.to_strings() == [enough, stops]
    assert table.take(np.flatnonzero(~is_alone)).dna.to_strings() == frames.dna.to_strings()
