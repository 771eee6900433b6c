import numpy as np
import pytest
from Bio.Data.CodonTable import unambiguous_dna_by_id

from virnuc_core.sequences.translation import (
    DNA_ALONE,
    FRAME_NAMES,
    LEAST_BASES,
    FrameTable,
    open_frames,
    with_closed_chunks,
)

STANDARD_CODE: dict[str, str] = unambiguous_dna_by_id[1].forward_table


def frames_of(*chunks: str) -> FrameTable:
    ends = np.cumsum([len(chunk) for chunk in chunks])
    starts = ends - [len(chunk) for chunk in chunks]
    return open_frames(np.frombuffer("".join(chunks).encode(), np.uint8), starts, ends)


def named(table: FrameTable) -> dict[str, tuple[str, str]]:
    names = [FRAME_NAMES[number] for number in table.frame]
    values = zip(table.dna.to_strings(), table.protein.to_strings(), strict=True)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("codon", STANDARD_CODE)
def test_every_codon_is_read_by_the_standard_code(codon: str) -> None:
    assert named(frames_of(codon))["F1"] == (codon, STANDARD_CODE[codon])


@pytest.mark.parametrize("codon", ["TAA", "TAG", "TGA"])
def test_a_stop_closes_its_frame(codon: str) -> None:
    assert "F1" not in named(frames_of("GCC" + codon + "GCC"))


def test_the_slice_has_one_base_more_than_the_codons_unless_the_chunk_ends() -> None:
    assert named(frames_of("GCCGCCA"))["F1"] == ("GCCGCCA", "AA")
    assert named(frames_of("GCCGCCAC"))["F1"] == ("GCCGCCA", "AA")
    assert named(frames_of("GCCGCC"))["F1"] == ("GCCGCC", "AA")


def test_a_codon_with_another_letter_is_dropped_and_shortens_the_slice() -> None:
    assert named(frames_of("GCCNAAGGCCCC"))["F1"] == ("GCCNAAGGCC", "AGP")


@pytest.mark.parametrize("chunk", ["A", "AC", "NNNNNNNNN", "TAAN"])
def test_a_chunk_without_a_pure_codon_or_with_stops_gives_nothing_there(chunk: str) -> None:
    assert "F1" not in named(frames_of(chunk))


def test_only_acgt_are_complemented() -> None:
    assert named(frames_of("RCCGGC"))["R1"] == ("GCCG", "A")


def test_frames_do_not_read_over_the_border_of_a_chunk() -> None:
    table = frames_of("GC", "CGCC", "GCCA")
    assert table.chunk.tolist() == sorted(table.chunk.tolist())
    assert 0 not in table.chunk
    assert all(len(protein) == 1 for protein in table.protein.to_strings())


def test_nothing_open_gives_an_empty_table() -> None:
    table = frames_of("N" * 50)
    assert len(table) == len(table.protein) == len(table.dna) == 0


def test_a_chunk_without_an_open_frame_needs_bases_to_be_scored_by_its_dna() -> None:
    stops = "TTAATTAACTAGCTAG" * 4
    enough, too_few = stops[:LEAST_BASES] + "N" * 450, stops[: LEAST_BASES - 1] + "R" * 450
    chunks = ["N" * 500, enough, "GCC" * 40, too_few, stops]
    ends = np.cumsum([len(chunk) for chunk in chunks])
    starts = ends - [len(chunk) for chunk in chunks]
    bases = np.frombuffer("".join(chunks).encode(), np.uint8)
    frames = open_frames(bases, starts, ends)
    table = with_closed_chunks(frames, bases, starts, ends)
    is_alone = table.frame == DNA_ALONE
    assert table.chunk[is_alone].tolist() == [1, 4]
    assert table.take(np.flatnonzero(is_alone)).dna.to_strings() == [enough, stops]
    assert table.take(np.flatnonzero(~is_alone)).dna.to_strings() == frames.dna.to_strings()
