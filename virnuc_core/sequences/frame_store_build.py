"""Builds a frame store batch by batch: reads, validates, chunks and translates records."""

import logging
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import ByteColumn, Int64, UInt8
from virnuc_core.env_config import available_threads
from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import atomic_path, naming, sync_file, sync_folder, temporary_name
from virnuc_core.host_memory import keep_freed_memory
from virnuc_core.plain_text import LONGEST_NAME, cell_text, plain_name
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.sequences.frame_store import (
    REJECTED_NAME,
    FrameStore,
    StoreMeta,
    content_digest,
    map_strings,
)
from virnuc_core.sequences.frames import ChunkTable, FrameTable, chunk_table, longest_orfs, open_frames
from virnuc_core.sequences.reader import STDIN, Record, input_digest, iter_records, rejection_reason
from virnuc_core.specs import Alphabet, ChunkRule, FrameRule, InputFile

logger = logging.getLogger(__name__)

REJECTED_HEADER: Final = "record\tid\tfile\tlength\treason\n"
# Letters per batch: small enough for the CPU cache, large enough to amortise NumPy calls.
_BATCH_LETTERS: Final = 1 << 20


def build_frame_store(
    inputs: Sequence[str | Path],
    folder: str | Path,
    chunk_length: ChunkRule | None,
    alphabet: Alphabet = "dna",
    *,
    frames: FrameRule = "open",
    min_length: int = 0,
    rejected_copy: Path | None = None,
) -> FrameStore:
    """Stores the frames of sequence files, or without `chunk_length` their whole sequences, in a new store.

    The store appears under its name when complete, replacing an older one. Peak memory is about 5 bytes per letter of
    the longest record plus 8 bytes per record. `rejected_copy` is a second path for rejected.tsv, for one with records
    alone, even if no record is usable.

    Raises:
        InputError: an input cannot be read, changes meanwhile, or has no usable record.
        UsageError: `folder` is not a frame store.
    """
    folder = Path(folder)
    with _new_folder(folder) as building:
        _Builder(building, chunk_length, alphabet, frames, min_length).build(inputs, rejected_copy)
    return FrameStore.open(folder)


def store_sequences(sequences: Sequence[bytes], folder: Path, alphabet: Alphabet) -> FrameStore:
    """Stores usable, clean sequences whole in a new store; their names are their indices, from 0."""
    records = [Record(i + 1, "", str(i), sequence) for i, sequence in enumerate(sequences)]
    with _new_folder(folder) as building:
        builder = _Builder(building, None, alphabet)
        builder.add_all(records)
        builder.finish(inputs=())
    return FrameStore.open(folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `folder` if the block succeeds; raises UsageError unless that is a store."""
    if folder.exists() and not StoreMeta.is_in(folder):
        raise UsageError(f"{folder} exists and is not a frame store: move it, or choose another folder.")
    temporary = temporary_name(folder)
    with naming(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            sync_folder(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.replace(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder.parent)


@dataclass(frozen=True, slots=True)
class _ChunkGroup:
    """Chunks of about `_BATCH_LETTERS` in all, the first with number `first_chunk`; chunk i is bases[starts[i]:ends[i]]."""

    first_chunk: int
    bases: UInt8
    starts: Int64
    ends: Int64


def _groups(sequences: ByteColumn, chunks: ChunkTable, first_chunk: int) -> Iterator[_ChunkGroup]:
    """Cuts the chunks of records into groups, also within a record."""
    starts = sequences.offsets[chunks.record] + chunks.start
    ends = sequences.offsets[chunks.record] + chunks.end
    bounds = np.searchsorted(ends, np.arange(_BATCH_LETTERS, int(ends[-1]), _BATCH_LETTERS))
    for group in np.split(np.arange(len(ends)), bounds):
        if len(group):
            left, right = int(starts[group[0]]), int(ends[group[-1]])
            bases, first = sequences.data[left:right], first_chunk + int(group[0])
            yield _ChunkGroup(first, bases, starts[group] - left, ends[group] - left)


class _Builder:
    num_records = num_chunks = num_frames = num_rejected = num_escaped = 0

    def __init__(
        self,
        folder: Path,
        chunk_length: ChunkRule | None,
        alphabet: Alphabet,
        frames: FrameRule = "open",
        min_length: int = 0,
    ) -> None:
        self.folder, self.chunk_length, self.alphabet = folder, chunk_length, alphabet
        self.frames, self.min_length, self.name_hashes = frames, min_length, array("q")

    def build(self, inputs: Sequence[str | Path], rejected_copy: Path | None) -> None:
        """Reads the inputs and writes everything, meta.json last; raises InputError."""
        digests = tuple(input_digest(path) for path in inputs)
        self.add_all(iter_records(inputs, self.alphabet))
        for path, before in zip(inputs, digests, strict=True):
            if input_digest(path) != before:
                raise InputError(
                    f"{path} changed while being read: wait until it is complete, and run the same "
                    "command again."
                )
        if rejected_copy is not None and self.num_rejected:
            with atomic_path(rejected_copy) as temporary:
                shutil.copyfile(self.folder / REJECTED_NAME, temporary)
        elif rejected_copy is not None:
            rejected_copy.unlink(missing_ok=True)
        if not self.num_records:
            raise InputError(self._nothing_usable(inputs, rejected_copy))
        if self.num_rejected:
            total = self.num_rejected + self.num_records
            logger.warning("%d of %d records skipped: see %s", self.num_rejected, total, REJECTED_NAME)
        if self.num_escaped:
            logger.warning(
                "%d records have names unsafe for tables or terminals; such characters are written as %%XX, and names are cut "
                "after %d bytes",
                self.num_escaped,
                LONGEST_NAME,
            )
        self.finish(digests)

    def add_all(self, records: Iterable[Record]) -> None:
        """Stores the usable records and their frames, and lists the others in rejected.tsv."""
        keep_freed_memory()
        threads = min(4, available_threads())  # what holds Python's lock takes a third of the time
        with Prefetcher(
            self._find_frames, self._add_records(records), depth=threads, threads=threads
        ) as found:
            for first_chunk, frames in found:
                self._append("frame_chunk", first_chunk + frames.chunk)
                self._append("frame_number", frames.frame)
                self._append("frame_start", frames.start)
                self._append_strings("protein", frames.protein)
                self._append_strings("dna", frames.dna)
                self.num_frames += len(frames.chunk)

    def _add_records(self, records: Iterable[Record]) -> Iterator[_ChunkGroup]:
        """Stores everything but the frames; yields the chunks to find these in."""
        batch: list[Record] = []
        letters = 0
        with open(self.folder / REJECTED_NAME, "w", encoding="utf-8", newline="\n") as rejected:
            rejected.write(REJECTED_HEADER)
            for record in records:
                length = len(record.sequence)
                reason = rejection_reason(record.sequence, self.alphabet)
                if reason is None and length < self.min_length:
                    reason = f"shorter than {self.min_length} (--min-length)"
                if reason is not None:
                    self.num_rejected += 1
                    path = record.path if record.path == STDIN else cell_text(record.path)
                    cells = (record.number, plain_name(_name(record)), path, length, reason)
                    rejected.write("\t".join(map(str, cells)) + "\n")
                    continue
                batch.append(record)
                letters += length
                if letters >= _BATCH_LETTERS:
                    yield from self._add(batch)
                    batch, letters = [], 0
        if batch:
            yield from self._add(batch)

    def finish(self, inputs: tuple[InputFile, ...]) -> None:
        """Writes meta.json, when everything else is on the disk."""
        num_renamed = self._make_names_unique()
        for path in self.folder.iterdir():
            sync_file(path)
        StoreMeta(
            chunk_length=self.chunk_length,
            alphabet=self.alphabet,
            frames=self.frames,
            inputs=inputs,
            num_records=self.num_records,
            num_chunks=self.num_chunks,
            num_frames=self.num_frames,
            num_rejected=self.num_rejected,
            num_renamed=num_renamed,
            content_sha256=content_digest(self.folder),
            min_length=self.min_length,
        ).write(self.folder)

    def _add(self, batch: list[Record]) -> Iterator[_ChunkGroup]:
        given = [_name(record) for record in batch]
        plain = [plain_name(name) for name in given]
        self.num_escaped += sum(name != written for name, written in zip(given, plain, strict=True))
        self.name_hashes.extend(hash(name.encode()) for name in plain)
        sequences = ByteColumn.from_strings([record.sequence for record in batch])
        self._append_strings("record_name", ByteColumn.from_strings(plain))
        self._append("record_number", np.array([record.number for record in batch], np.int64))
        self._append("record_length", sequences.lengths)
        if self.chunk_length is None:
            rows, zeros = np.arange(len(batch)), np.zeros(len(batch), np.int64)
            chunks = ChunkTable(rows, zeros, zeros, sequences.lengths)
            self._append("frame_chunk", self.num_chunks + rows)
            self._append("frame_number", zeros.astype(np.uint8))
            self._append("frame_start", zeros)
            self._append_strings(self.alphabet, sequences)
            self.num_frames += len(batch)
        else:
            self._append_strings("sequence", sequences)
            chunks = chunk_table(sequences.lengths, self.chunk_length)
            yield from _groups(sequences, chunks, self.num_chunks)
        self._append("chunk_record", self.num_records + chunks.record)
        self._append("chunk_index", chunks.index)
        self._append("chunk_start", chunks.start)
        self._append("chunk_end", chunks.end)
        self.num_records += len(batch)
        self.num_chunks += len(chunks.record)

    def _find_frames(self, group: _ChunkGroup) -> tuple[int, FrameTable]:
        find_frames = open_frames if self.frames == "open" else longest_orfs
        return group.first_chunk, find_frames(group.bases, group.starts, group.ends)

    def _append(self, name: str, values: npt.NDArray[Any]) -> None:
        with (self.folder / f"{name}.bin").open("ab") as file:
            file.write(np.ascontiguousarray(values).data)

    def _append_strings(self, name: str, strings: ByteColumn) -> None:
        path, offsets = self.folder / f"{name}.bin", strings.offsets
        if not path.exists():
            self._append(f"{name}.offsets", np.zeros(1, np.int64))
            path.touch()
        self._append(f"{name}.offsets", offsets[1:] + (path.stat().st_size - offsets[0]))
        self._append(name, strings.data[offsets[0] : offsets[-1]])

    def _make_names_unique(self) -> int:
        """Renames records whose name is already taken, and returns their number."""
        names = map_strings(self.folder, "record_name", self.num_records)
        numbers = _repeat_numbers(names, np.array(self.name_hashes, np.int64))
        rows = np.flatnonzero(numbers)
        if not len(rows):
            return 0
        example = names.rows(rows[0], rows[0] + 1).to_strings()[0]
        logger.warning(
            "%d records have duplicate names; later copies are numbered: the next %s is now %s",
            len(rows), example, _numbered(example, int(numbers[rows[0]])),
        )  # fmt: skip
        block_rows = 1 << 16
        for begin in range(0, len(names), block_rows):
            block = names.rows(begin, min(begin + block_rows, len(names))).to_strings()
            unique = map(_numbered, block, numbers[begin : begin + block_rows].tolist())
            self._append_strings("unique_name", ByteColumn.from_strings(unique))
        for suffix in ("bin", "offsets.bin"):
            (self.folder / f"unique_name.{suffix}").replace(self.folder / f"record_name.{suffix}")
        return len(rows)

    def _nothing_usable(self, inputs: Sequence[str | Path], rejected_copy: Path | None) -> str:
        files = ", ".join(map(str, inputs))
        if not self.num_rejected:
            return f"{files}: no sequence record found. Give FASTA or FASTQ files with at least one record."
        with open(self.folder / REJECTED_NAME, encoding="utf-8") as table:
            next(table)
            reason = next(table).rstrip("\n").split("\t")[-1]
        where = f" {rejected_copy} lists them all." if rejected_copy else ""
        return (
            f"{files}: none of the {self.num_rejected} records can be used; the first: {reason}.{where} Give "
            f"{'nucleotide' if self.alphabet == 'dna' else 'protein'} sequences"
            f"{' or a smaller --min-length' if self.min_length else ''}."
        )


def _name(record: Record) -> str:
    return record.name or f"record_{record.number}"


def _numbered(name: str, number: int) -> str:
    """Name of the number-th record of that name; unchanged for 0."""
    return f"{name}_dup{number}" if number else name


def _repeat_numbers(names: ByteColumn, hashes: Int64) -> npt.NDArray[np.int32]:
    """int32 (n,), for `_numbered`: 0 for a new name, 2 for the second record of a name, ..., skipping taken names.

    Works on the int64 `hash` of each UTF-8 name, so that not all names are in memory. Two different names share a hash in
    about 1 of 10^5 inputs of 10^7 records; the later one is then renamed needlessly, which is harmless.
    """
    order = np.argsort(hashes, kind="stable")
    known = hashes[order]
    numbers = np.zeros(len(hashes), np.int32)
    for place in np.flatnonzero(known[1:] == known[:-1]):
        previous, row = order[place], order[place + 1]
        [name] = names.rows(row, row + 1).to_strings()
        number = max(int(numbers[previous]), 1) + 1
        while (taken := hash(_numbered(name, number).encode())) in known[np.searchsorted(known, taken) :][:1]:
            number += 1
        numbers[row] = number
    return numbers
