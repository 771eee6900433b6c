"""All open frames of an input (or all its sequences) in memory-mapped columns with random access.

A store is a folder:

    meta.json       written last; without it the folder is not a store
    rejected.tsv    the records that were not used, with the reason
    record_*.bin    one row a used record: name, length, number in the input
    sequence.bin    one byte string a used record: all its bases, for what is written of whole contigs
    chunk_*.bin     one row a chunk: record, index in it, start, end
    frame_*.bin     one row an open frame, in order of chunk and frame: chunk, frame; where it is asked for, one row a
                    chunk without an open frame too, of which there is no protein
    protein.bin, dna.bin   what the models are given, one byte string a frame

When whole sequences are stored, each record is one chunk and one frame, and only one of protein and dna
is there, which is also its sequence.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from virnuc_core.atomic_write import atomic_path
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import UsageError
from virnuc_core.sequences.column_files import map_column, map_strings
from virnuc_core.sequences.store_meta import REJECTED_NAME, StoreMeta
from virnuc_core.sequences.translation import ROW_NAMES

Int64 = npt.NDArray[np.int64]

_TABLE_ROWS: Final = 1 << 14


@dataclass(frozen=True, eq=False, slots=True)
class FrameStore:
    """Read-only view of a frame store; every column is memory-mapped.

    Attributes:
        folder: where it lies.
        meta: counts and origin.
        record_length: int64 (num_records,), letters of each record.
        record_number: int64 (num_records,), 1-based place among all records of the input.
        chunk_record: int64 (num_chunks,), row of the record.
        chunk_index: int64 (num_chunks,), 0-based place in the record.
        chunk_start: int64 (num_chunks,), first letter, 0-based.
        chunk_end: int64 (num_chunks,), one past the last letter.
        frame_chunk: int64 (num_frames,), row of the chunk; ascending.
        frame_number: uint8 (num_frames,), 0..5 for F1..R3, DNA_ALONE for a chunk without an open frame; 0 for whole
            sequences.
        names: (num_records,), unique record names in UTF-8.
        sequences: (num_records,), the bases of each record, upper case; None when whole sequences are stored.
        protein: (num_frames,) for ESM-2; None when whole DNA sequences are stored.
        dna: (num_frames,) for DNABERT-S; None when whole proteins are stored.
    """

    folder: Path
    meta: StoreMeta
    record_length: Int64
    record_number: Int64
    chunk_record: Int64
    chunk_index: Int64
    chunk_start: Int64
    chunk_end: Int64
    frame_chunk: Int64
    frame_number: npt.NDArray[np.uint8]
    names: ByteColumn
    sequences: ByteColumn | None
    protein: ByteColumn | None
    dna: ByteColumn | None

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Maps a store into memory.

        Raises:
            DamagedFileError: the folder is not a whole store, or of another schema version.
        """
        folder = Path(folder)
        meta = StoreMeta.read(folder)

        def numbers(name: str, count: int) -> Int64:
            return map_column(folder, name, np.int64, count)

        whole = meta.chunk_length is None
        return cls(
            folder=folder,
            meta=meta,
            record_length=numbers("record_length", meta.num_records),
            record_number=numbers("record_number", meta.num_records),
            chunk_record=numbers("chunk_record", meta.num_chunks),
            chunk_index=numbers("chunk_index", meta.num_chunks),
            chunk_start=numbers("chunk_start", meta.num_chunks),
            chunk_end=numbers("chunk_end", meta.num_chunks),
            frame_chunk=numbers("frame_chunk", meta.num_frames),
            frame_number=map_column(folder, "frame_number", np.uint8, meta.num_frames),
            names=map_strings(folder, "record_name", meta.num_records),
            sequences=None if whole else map_strings(folder, "sequence", meta.num_records),
            protein=None
            if whole and meta.alphabet == "dna"
            else map_strings(folder, "protein", meta.num_frames),
            dna=None if meta.alphabet == "protein" else map_strings(folder, "dna", meta.num_frames),
        )

    @property
    def num_records(self) -> int:
        """Used records."""
        return self.meta.num_records

    @property
    def num_chunks(self) -> int:
        """Chunks of the used records."""
        return self.meta.num_chunks

    @property
    def num_frames(self) -> int:
        """Frames (or whole sequences): the rows that a run embeds."""
        return self.meta.num_frames

    @property
    def rejected_path(self) -> Path:
        """Table of the records that were not used."""
        return self.folder / REJECTED_NAME

    def record_names(self, begin: int, end: int) -> list[str]:
        """Names of the records begin..end-1."""
        return self.names.rows(begin, end).to_strings()

    def sequence(self, row: int) -> bytes:
        """All letters of one record."""
        columns = (self.sequences, self.dna, self.protein)
        return next(c.rows(row, row + 1).to_strings()[0].encode() for c in columns if c is not None)

    def chunk_ids(self, begin: int, end: int) -> list[str]:
        """`NAME_chunk_1`, `NAME_chunk_2`, ... of the chunks begin..end-1."""
        if begin >= end:
            return []
        records = self.chunk_record[begin:end]
        first = int(records[0])
        names = self.record_names(first, int(records[-1]) + 1)
        return [
            f"{names[record - first]}_chunk_{index + 1}"
            for record, index in zip(records.tolist(), self.chunk_index[begin:end].tolist(), strict=True)
        ]

    def frame_ids(self, begin: int, end: int) -> list[str]:
        """Chunk id and frame, `NAME_chunk_1F1` or `NAME_chunk_2DNA`, of the rows begin..end-1; the record name for whole sequences."""
        if self.meta.chunk_length is None:
            return self.record_names(begin, end)
        if begin >= end:
            return []
        chunks = self.frame_chunk[begin:end]
        first = int(chunks[0])
        ids = self.chunk_ids(first, int(chunks[-1]) + 1)
        return [
            ids[chunk - first] + ROW_NAMES[frame]
            for chunk, frame in zip(chunks.tolist(), self.frame_number[begin:end].tolist(), strict=True)
        ]

    @staticmethod
    def order_by_length(column: ByteColumn, begin: int, end: int) -> Int64:
        """int64 (end - begin,): the rows begin..end-1 of a column, longest first, equal ones in order."""
        return begin + np.argsort(-column.rows(begin, end).lengths, kind="stable")


def write_frames_tsv(store: FrameStore, path: str | Path) -> None:
    """Writes the table `frame_id nucleotide protein` of a store of frames, gzip-compressed for `.gz`.

    Raises:
        UsageError: the store holds whole sequences.
    """
    path = Path(path)
    if store.dna is None or store.protein is None:
        raise UsageError(f"{store.folder} holds whole sequences, not frames. Give a chunk length.")
    with atomic_path(path) as temporary, open(temporary, "wb") as raw, ExitStack() as closing:
        stream: BinaryIO | GzipFile = raw
        if path.suffix == ".gz":
            # Without name and time, equal tables are equal files.
            stream = closing.enter_context(GzipFile("", "wb", 6, raw, mtime=0))
        stream.write(b"frame_id\tnucleotide\tprotein\n")
        for begin in range(0, store.num_frames, _TABLE_ROWS):
            end = min(begin + _TABLE_ROWS, store.num_frames)
            rows = zip(
                store.frame_ids(begin, end),
                store.dna.rows(begin, end).to_strings(),
                store.protein.rows(begin, end).to_strings(),
                strict=True,
            )
            stream.write("".join(f"{name}\t{dna}\t{protein}\n" for name, dna, protein in rows).encode())
