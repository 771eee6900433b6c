"""Chunks of records and what is embedded of them: open reading frames or the longest ORFs."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from virnuc_core.columns import ByteColumn, Int64, UInt8, concatenated_ranges, offsets_of
from virnuc_core.specs import ChunkRule, chunk_steps

FRAME_NAMES: Final = ("F1", "F2", "F3", "R1", "R2", "R3")
LEAST_RESIDUES: Final = 10  # in such an ORF

_STOP, _DROPPED = ord("*"), 0  # the latter marks a codon that is not pure ACGT
_AMINO_ACID: Final = b"KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF".ljust(256, b"\0")
_OTHER: Final = 64  # code of letters other than A, C, G and T, which have 0 to 3, and of codons with them
_LETTER_CODES: Final = bytes(
    "ACGT".index(letter) if letter in "ACGT" else _OTHER for letter in map(chr, range(256))
)


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """n chunks ordered by record and position; `index` is 0-based in the record, and start..end-1 are its bases."""

    record: Int64
    index: Int64
    start: Int64
    end: Int64


def chunk_table(lengths: Int64, chunk_length: ChunkRule) -> ChunkTable:
    """Cuts records, int64 (R,) lengths in bases of at least 1, into overlapping chunks of K bp.

    K is `chunk_length`, or where that is a table what it gives for the length of the record. A record of L bases gives
    n = ceil(L / K) chunks that cover all of it; the surplus n * K - L is distributed as overlaps between neighbours. The
    last chunk is often shorter.

    Source: VirNucPro, `split_fasta_chunk`: overlaps are base + 1 for the first `longer` chunks and base for the others,
    so that chunk i is shifted back by i * base + min(i, longer).
    """
    steps = chunk_steps(chunk_length)
    step_of_record = np.searchsorted([below for _, below in steps if below is not None], lengths, "right")
    size = np.array([size for size, _ in steps], np.int64)[step_of_record]
    counts = -(-lengths // size)
    surplus = counts * size - lengths
    base = surplus // np.maximum(counts, 1)
    longer = surplus - base * (counts - 1)

    record = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    index = np.arange(len(record), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    start = index * (size - base)[record] - np.minimum(index, longer[record])
    end = np.minimum(start + size[record], lengths[record])
    return ChunkTable(record, index, start, end)


@dataclass(frozen=True, slots=True)
class FrameTable:
    """n rows of a range of chunks, ordered by chunk and frame.

    Attributes:
        frame: index into FRAME_NAMES.
        start: first base of the row, from 0, on the frame's strand of the chunk.
        protein: the translation, without codons that have letters other than ACGT.
        dna: input of DNABERT-S: the frame's strand from `start` on, 3 bases per residue; of an open frame one more unless
            the chunk ends there.
    """

    chunk: Int64
    frame: UInt8
    start: Int64
    protein: ByteColumn
    dna: ByteColumn


def open_frames(bases: UInt8, starts: Int64, ends: Int64) -> FrameTable:
    """Translates chunks in six frames and keeps those with a non-empty protein without a stop.

    `bases` is upper-case sequence, uint8 (N,), possibly of several records; chunk i is bases[starts[i]:ends[i]].

    Source: VirNucPro, `identify_seq` and `translate_dna`: standard code, no start codon, no minimum length; the slice
    given to DNABERT-S is strand[f : f + 1 + 3 * residues].
    """
    frames = _SixFrames.of(bases, starts, ends)
    residues, begin, num_codons = frames.residues, frames.begin, frames.num_codons
    num_dropped = _count_between(np.flatnonzero(residues == _DROPPED), begin, begin + num_codons)
    num_stops = _count_between(np.flatnonzero(residues == _STOP), begin, begin + num_codons)
    kept = np.flatnonzero((num_stops == 0) & (num_codons > num_dropped))

    protein = ByteColumn.gather(residues, begin[kept], num_codons[kept])
    if num_dropped[kept].any():
        protein = ByteColumn(
            protein.data[protein.data != _DROPPED], offsets_of((num_codons - num_dropped)[kept])
        )
    chunk, frame = np.divmod(kept, 6)
    start = frame % 3
    strand_left = (ends - starts)[chunk] - start
    dna = ByteColumn.gather(
        frames.strands, frames.first[kept], np.minimum(3 * protein.lengths + 1, strand_left)
    )
    return FrameTable(chunk, frame.astype(np.uint8), start, protein, dna)


def longest_orfs(bases: UInt8, starts: Int64, ends: Int64) -> FrameTable:
    """Takes the longest ORF, codons of A, C, G and T without a stop, in each frame, and keeps a chunk's longest two.

    The second is kept only where the longest covers less than 60% of the chunk. ORFs may begin and end anywhere, also
    at an end of the chunk, and have at least `LEAST_RESIDUES` residues; the first of equally long ones counts, in its frame
    and among the frames. The arguments are those of `open_frames`.
    """
    frames = _SixFrames.of(bases, starts, ends)
    left, longest = _longest_runs(frames)
    by_length = np.argsort(-longest.reshape(-1, 6), axis=1, kind="stable")
    is_short = 5 * longest.reshape(-1, 6).max(axis=1) < ends - starts
    is_kept = np.zeros((len(starts), 6), np.bool_)
    np.put_along_axis(is_kept, by_length[:, :1], True, axis=1)
    np.put_along_axis(is_kept, by_length[:, 1:2], is_short[:, None], axis=1)
    kept = np.flatnonzero(is_kept.ravel() & (longest >= LEAST_RESIDUES))

    chunk, frame = np.divmod(kept, 6)
    codons, num_codons = left[kept], longest[kept]
    skipped = 3 * (codons - frames.begin[kept])
    protein = ByteColumn.gather(frames.residues, codons, num_codons)
    dna = ByteColumn.gather(frames.strands, frames.first[kept] + skipped, 3 * num_codons)
    return FrameTable(chunk, frame.astype(np.uint8), frame % 3 + skipped, protein, dna)


@dataclass(frozen=True, slots=True)
class _SixFrames:
    """The six frames of C chunks, chunk by chunk: arrays (6 * C,), and what they point into.

    Attributes:
        strands: the bases, then their reverse complement.
        residues: amino acid of the codon at every position of the strands, by phase, so that every frame is contiguous.
        first: first base of the frame in `strands`.
        begin: first codon of the frame in `residues`.
    """

    strands: UInt8
    residues: UInt8
    first: Int64
    begin: Int64
    num_codons: Int64

    @classmethod
    def of(cls, bases: UInt8, starts: Int64, ends: Int64) -> "_SixFrames":
        total = len(bases)
        forward = np.ascontiguousarray(bases).tobytes()
        strands = forward + forward[::-1].translate(bytes.maketrans(b"ACGT", b"TGCA"))
        residues, codons_per_phase = _translate_by_phase(strands)
        # A chunk's reverse complement is at the mirrored position in the second half of `strands`.
        shift = np.arange(3)
        first = np.concatenate([starts[:, None] + shift, (2 * total - ends)[:, None] + shift], axis=1).ravel()
        num_codons = np.maximum((ends - starts)[:, None] - np.tile(shift, 2), 0).ravel() // 3
        begin = (first % 3) * codons_per_phase + first // 3
        return cls(np.frombuffer(strands, np.uint8), residues, first, begin, num_codons)


def _longest_runs(frames: _SixFrames) -> tuple[Int64, Int64]:
    """First codon in `residues`, and length, of the longest run of residues in each frame, both (6 * C,)."""
    breaks = np.flatnonzero((frames.residues == _STOP) | (frames.residues == _DROPPED))
    end = frames.begin + frames.num_codons
    first_break = np.searchsorted(breaks, frames.begin)
    num_breaks = np.searchsorted(breaks, end) - first_break

    # The breaks of a frame cut it into one run more, possibly empty ones.
    within, _ = concatenated_ranges(first_break, num_breaks)
    offsets = offsets_of(num_breaks + 1)
    is_last = np.zeros(offsets[-1], np.bool_)
    is_last[offsets[1:] - 1] = True
    is_first = np.roll(is_last, 1)
    left, right = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    left[is_first], left[~is_first] = frames.begin, breaks[within] + 1
    right[is_last], right[~is_last] = end, breaks[within]

    lengths = right - left
    longest = np.maximum.reduceat(lengths, offsets[:-1])
    is_longest = np.flatnonzero(lengths == np.repeat(longest, num_breaks + 1))
    return left[is_longest[np.searchsorted(is_longest, offsets[:-1])]], longest


def _translate_by_phase(strands: bytes) -> tuple[UInt8, int]:
    """Amino acid of the codon at every position, uint8 (3 * M,), and M, grouped by position mod 3.

    The codon at position p is at (p % 3) * M + p // 3, so that every reading frame is contiguous.
    """
    letters = np.frombuffer(strands.translate(_LETTER_CODES), np.uint8)
    first, second, third = letters[:-2], letters[1:-1], letters[2:]
    codes = first << 4 | second << 2 | third  # the bit of other letters is shifted out, but for the third
    codes |= (first | second) & _OTHER
    rows = -(-len(strands) // 3)
    by_phase = np.full((3, rows), _OTHER, np.uint8)
    for phase in range(3):
        column = codes[phase::3]
        by_phase[phase, : len(column)] = column
    return np.frombuffer(by_phase.tobytes().translate(_AMINO_ACID), np.uint8), rows


def _count_between(positions: Int64, begin: Int64, end: Int64) -> Int64:
    """int64 (n,): how many of the ascending positions are in begin[i]..end[i]-1."""
    counts: Int64 = np.searchsorted(positions, end) - np.searchsorted(positions, begin)
    return counts
