"""Frames of an input (or its whole sequences) in memory-mapped columns with random access.

A store is a folder:

    meta.json       written last; without it the folder is not a store
    rejected.tsv    unusable records, with the reason
    record_*.bin    one row per used record: name, length, number in the input
    sequence.bin    one byte string per used record: all its bases, for outputs of whole contigs
    chunk_*.bin     one row per chunk: record, index in it, start, end
    frame_*.bin     one row per frame, ordered by chunk and frame: chunk, frame, start
    protein.bin, dna.bin   model inputs, one byte string per frame

A numeric column is a raw little-endian file `NAME.bin`; a column of byte strings has its offsets in
`NAME.offsets.bin`. When whole sequences are stored, each record is one chunk and one frame, and its sequence is in
protein.bin or dna.bin only.
"""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from gzip import GzipFile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import ByteColumn, Int64
from virnuc_core.errors import DamagedFileError
from virnuc_core.files import atomic_path, file_digest, from_json, parse_object, write_text
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import Alphabet, ChunkRule, FrameRule, InputFile

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa

SCHEMA_VERSION: Final = 4
REJECTED_NAME: Final = "rejected.tsv"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """Contents and origin of a frame store.

    Attributes:
        chunk_length: in bp, or a table by record length; None for whole sequences, for which `frames` has no meaning.
        num_records: used records.
        num_frames: rows to embed: frames or whole sequences.
        num_renamed: records renamed because an earlier one has the same name.
        content_sha256: hex digest of all columns.
    """

    chunk_length: ChunkRule | None
    alphabet: Alphabet
    frames: FrameRule
    inputs: tuple[InputFile, ...]
    num_records: int
    num_chunks: int
    num_frames: int
    num_rejected: int
    num_renamed: int
    content_sha256: str
    min_length: int = 0
    schema_version: int = SCHEMA_VERSION

    def write(self, folder: Path) -> None:
        """Writes meta.json, which makes the folder a store."""
        write_text(folder / "meta.json", json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder has a meta.json, valid or not."""
        return (folder / "meta.json").is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads meta.json.

        Raises:
            DamagedFileError: it is missing, corrupt, or of another schema version.
            OSError: it cannot be read.
        """
        try:
            meta = from_json(cls, parse_object((folder / "meta.json").read_bytes()))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise DamagedFileError(
                f"{folder} is not a complete frame store: meta.json is invalid ({error!r}). "
                "Delete the folder and run again."
            ) from error
        if meta.schema_version != SCHEMA_VERSION:
            raise DamagedFileError(
                f"{folder} is a frame store of schema version {meta.schema_version}; this program reads "
                f"version {SCHEMA_VERSION}. Delete the folder and run again."
            )
        return meta


def content_digest(folder: Path) -> str:
    """SHA-256 over names and contents of a store's columns."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.bin")):
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def map_column(folder: Path, name: str, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Memory-maps a numeric column, read-only.

    Raises:
        DamagedFileError: the file is missing or does not hold `count` values.
    """
    path, size = folder / f"{name}.bin", np.dtype(dtype).itemsize * count
    found = path.stat().st_size if path.exists() else 0
    if found != size:
        raise DamagedFileError(
            f"{path} has {found} bytes instead of {size}: the frame store is damaged. "
            f"Delete {folder} and run again."
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def map_strings(folder: Path, name: str, count: int) -> ByteColumn:
    """Memory-maps a column of byte strings, read-only; raises as `map_column`."""
    if count == 0:
        return ByteColumn.from_strings(())
    offsets = map_column(folder, f"{name}.offsets", np.int64, count + 1)
    return ByteColumn(map_column(folder, name, np.uint8, int(offsets[-1])), offsets)


@dataclass(frozen=True, eq=False, slots=True)
class FrameStore:
    """Read-only, memory-mapped view of a frame store; `record_*`, `chunk_*` and `frame_*` have one row per record, chunk, frame.

    Attributes:
        record_number: 1-based index in the input.
        chunk_record: row of the record.
        chunk_index: 0-based index in the record.
        chunk_start: first letter, 0-based.
        chunk_end: one past the last letter.
        frame_chunk: row of the chunk; ascending.
        frame_number: index into FRAME_NAMES; 0 for whole sequences.
        frame_start: first base, 0-based, on the frame's strand of the chunk; 0 for whole sequences.
        names: unique record names in UTF-8.
        sequences: upper-case bases of the records; None for whole sequences.
        protein: of each frame, for ESM-2; None for whole DNA sequences.
        dna: of each frame, for DNABERT-S; None for whole proteins.
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
    frame_start: Int64
    names: ByteColumn
    sequences: ByteColumn | None
    protein: ByteColumn | None
    dna: ByteColumn | None

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Maps a store into memory; raises as `StoreMeta.read` and `map_column`."""
        folder = Path(folder)
        meta = StoreMeta.read(folder)
        counts = {"record": meta.num_records, "chunk": meta.num_chunks, "frame": meta.num_frames}
        numbers = {
            field.name: map_column(
                folder, field.name, np.uint8 if field.name == "frame_number" else np.int64, counts[kind]
            )
            for field in fields(cls)
            if (kind := field.name.partition("_")[0]) in counts
        }
        whole = meta.chunk_length is None

        def strings(name: str, count: int, is_there: bool) -> ByteColumn | None:
            return map_strings(folder, name, count) if is_there else None

        return cls(
            folder=folder,
            meta=meta,
            **numbers,
            names=map_strings(folder, "record_name", meta.num_records),
            sequences=strings("sequence", meta.num_records, not whole),
            protein=strings("protein", meta.num_frames, not (whole and meta.alphabet == "dna")),
            dna=strings("dna", meta.num_frames, meta.alphabet == "dna"),
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
        """Rows to embed: frames or whole sequences."""
        return self.meta.num_frames

    @property
    def rejected_path(self) -> Path:
        """Table of unusable records."""
        return self.folder / REJECTED_NAME

    def record_names(self, begin: int, end: int) -> list[str]:
        """Names of the records begin..end-1."""
        return self.names.rows(begin, end).to_strings()

    def sequence(self, row: int) -> bytes:
        """All letters of one record."""
        column = next(c for c in (self.sequences, self.dna, self.protein) if c is not None)
        return column.data[column.offsets[row] : column.offsets[row + 1]].tobytes()

    def sizes(self, rows: Int64) -> Int64:
        """int64 (n, 2): residues of frames, and bases of their chunks; not for whole sequences."""
        assert self.protein is not None
        offsets, chunks = self.protein.offsets, self.frame_chunk[rows]
        bases = self.chunk_end[chunks] - self.chunk_start[chunks]
        return np.stack((offsets[rows + 1] - offsets[rows], bases), axis=1)

    def chunk_names(self, begin: int, end: int) -> "pa.StringArray":
        """Names of the records of the chunks begin..end-1."""
        import pyarrow as pa

        records = self.chunk_record[begin:end]
        first, last = (int(records[0]), int(records[-1])) if len(records) else (0, -1)
        return self.names.rows(first, last + 1).to_arrow().take(pa.array(records - first))

    def chunk_id_column(self, begin: int, end: int) -> "pa.StringArray":
        """`NAME_chunk_1`, `NAME_chunk_2`, ... of the chunks begin..end-1."""
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pa.array(self.chunk_index[begin:end] + 1).cast(pa.string())
        return pc.binary_join_element_wise(self.chunk_names(begin, end), numbers, "_chunk_")

    def frame_id_column(self, begin: int, end: int) -> "pa.StringArray":
        """`NAME_chunk_1F1` of the rows begin..end-1; record names for whole sequences."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.meta.chunk_length is None:
            return self.names.rows(begin, end).to_arrow()
        chunks = self.frame_chunk[begin:end]
        first, last = (int(chunks[0]), int(chunks[-1])) if len(chunks) else (0, -1)
        ids = self.chunk_id_column(first, last + 1).take(pa.array(chunks - first))
        frames = pa.array(FRAME_NAMES).take(pa.array(self.frame_number[begin:end]))
        return pc.binary_join_element_wise(ids, frames, "")

    def frame_ids(self, begin: int, end: int) -> list[str]:
        """`frame_id_column` as a list."""
        return list(self.frame_id_column(begin, end).to_pylist())


def write_frames_tsv(store: FrameStore, path: str | Path) -> None:
    """Writes the table `frame_id nucleotide protein`, gzip-compressed for `.gz`, of a store that holds frames."""
    path = Path(path)
    assert store.dna is not None
    assert store.protein is not None
    with atomic_path(path) as temporary, open(temporary, "wb") as raw:
        # Without name and time, equal tables are byte-identical.
        is_gzip = path.suffix == ".gz"
        with GzipFile("", "wb", 6, raw, mtime=0) if is_gzip else nullcontext(raw) as stream:
            stream.write(b"frame_id\tnucleotide\tprotein\n")
            for begin in range(0, store.num_frames, 1 << 14):
                end = min(begin + (1 << 14), store.num_frames)
                columns = (column.rows(begin, end).to_strings() for column in (store.dna, store.protein))
                rows = zip(store.frame_ids(begin, end), *columns, strict=True)
                stream.write("".join("\t".join(row) + "\n" for row in rows).encode())
