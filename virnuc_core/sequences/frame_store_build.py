"""Builds a frame store batch by batch: reads, validates, chunks and translates records."""

import logging
import operator
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, TextIO

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import ByteColumn
from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import atomic_path, naming, sync_file, sync_folder, temporary_name
from virnuc_core.plain_text import LONGEST_NAME, cell_text, plain_name
from virnuc_core.sequences.frame_store import (
    REJECTED_NAME,
    FrameStore,
    StoreMeta,
    column_path,
    content_digest,
    map_strings,
)
from virnuc_core.sequences.frames import chunk_table, longest_stretches, open_frames
from virnuc_core.sequences.reader import STDIN, Record, input_digest, iter_records, rejection_reason
from virnuc_core.specs import Alphabet, ChunkRule, FrameRule

logger = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

REJECTED_HEADER: Final = "record\tid\tfile\tlength\treason\n"
# Letters per batch: small enough for the CPU cache, large enough to amortise NumPy calls.
_BATCH_LETTERS: Final = 1 << 20
_BLOCK_ROWS: Final = 1 << 16


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
    the longest record plus 8 bytes per record. `rejected_copy` is a second path for rejected.tsv, which is written even if
    no record is usable.

    Raises:
        InputError: an input cannot be read, changes meanwhile, or has no usable record.
        UsageError: the chunk length is below 1 or given for proteins, or `folder` is not a frame store.
    """
    is_too_short = isinstance(chunk_length, int) and chunk_length < 1
    if chunk_length is not None and (alphabet != "dna" or is_too_short):
        raise UsageError(
            f"A chunk length of {chunk_length} cannot be used with {alphabet} records. "
            "Give a positive chunk length for DNA, and none for proteins."
        )
    folder = Path(folder)
    with naming(folder), _new_folder(folder) as building:
        _Builder(building, chunk_length, alphabet, frames, min_length).build(inputs, rejected_copy)
    return FrameStore.open(folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `folder` if the block succeeds; raises UsageError unless that is a store."""
    if folder.exists() and not StoreMeta.is_in(folder):
        raise UsageError(f"{folder} is in the way: it is not a frame store. Move it or name another folder.")
    temporary = temporary_name(folder)
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


class _ColumnWriter:
    """Appends to columns; synced to disk when its block succeeds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._string_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()
        if error is None:
            for name in self._files:
                sync_file(column_path(self._folder, name))

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Appends numbers; the dtype must not change between calls."""
        if name not in self._files:
            path = column_path(self._folder, name)
            self._files[name] = self._open_files.enter_context(path.open("wb"))
        self._files[name].write(np.ascontiguousarray(values).data)

    def append_strings(self, name: str, strings: ByteColumn) -> None:
        offsets = strings.offsets
        if name not in self._string_bytes:
            self._string_bytes[name] = 0
            self.append(f"{name}.offsets", np.zeros(1, np.int64))
        self.append(f"{name}.offsets", offsets[1:] + (self._string_bytes[name] - offsets[0]))
        self.append(name, strings.data[offsets[0] : offsets[-1]])
        self._string_bytes[name] += int(offsets[-1] - offsets[0])


class _Builder:
    def __init__(
        self,
        folder: Path,
        chunk_length: ChunkRule | None,
        alphabet: Alphabet,
        frames: FrameRule,
        min_length: int,
    ) -> None:
        self._folder = folder
        self._chunk_length = chunk_length
        self._alphabet: Alphabet = alphabet
        self._frames: FrameRule = frames
        self._min_length = min_length
        self._name_hashes = array("q")
        self._num_records = self._num_chunks = self._num_frames = self._num_rejected = 0
        self._num_escaped = 0

    def build(self, inputs: Sequence[str | Path], rejected_copy: Path | None) -> None:
        """Reads the inputs and writes everything, meta.json last; raises InputError."""
        digests = tuple(input_digest(path) for path in inputs)
        rejected = self._folder / REJECTED_NAME
        with (
            open(rejected, "w", encoding="utf-8", newline="\n") as table,
            _ColumnWriter(self._folder) as columns,
        ):
            for batch in self._batches(iter_records(inputs, self._alphabet), table):
                self._add(columns, batch)
        for path, before in zip(inputs, digests, strict=True):
            if input_digest(path) != before:
                raise InputError(
                    f"{path} changed while it was read: wait until whatever writes it has ended, and run the same "
                    "command again."
                )
        if rejected_copy is not None:
            with atomic_path(rejected_copy) as temporary:
                shutil.copyfile(rejected, temporary)
        if not self._num_records:
            raise InputError(self._nothing_usable(inputs, rejected_copy))
        if self._num_rejected:
            logger.warning(
                "%d of %d records are not used; %s says why",
                self._num_rejected, self._num_rejected + self._num_records, REJECTED_NAME,
            )  # fmt: skip
        if self._num_escaped:
            logger.warning(
                "%d records have names that could do harm in tables or terminals; they are written with %%XX in place "
                "of such characters, and cut after %d bytes", self._num_escaped, LONGEST_NAME,
            )  # fmt: skip
        sync_file(rejected)
        num_renamed = self._make_names_unique()
        StoreMeta(
            chunk_length=self._chunk_length,
            alphabet=self._alphabet,
            frames=self._frames,
            inputs=digests,
            num_records=self._num_records,
            num_chunks=self._num_chunks,
            num_frames=self._num_frames,
            num_rejected=self._num_rejected,
            num_renamed=num_renamed,
            content_sha256=content_digest(self._folder),
            min_length=self._min_length,
        ).write(self._folder)

    def _batches(self, records: Iterator[Record], rejected: TextIO) -> Iterator[list[Record]]:
        rejected.write(REJECTED_HEADER)
        batch: list[Record] = []
        letters = 0
        for record in records:
            length = len(record.sequence)
            reason = rejection_reason(record.sequence, self._alphabet)
            if reason is None and length < self._min_length:
                reason = f"shorter than {self._min_length} (--min-length)"
            if reason is not None:
                self._num_rejected += 1
                name = plain_name(_name(record))
                path = record.path if record.path == STDIN else cell_text(record.path)
                rejected.write(f"{record.number}\t{name}\t{path}\t{length}\t{reason}\n")
                continue
            batch.append(record)
            letters += length
            if letters >= _BATCH_LETTERS:
                yield batch
                batch, letters = [], 0
        if batch:
            yield batch

    def _add(self, columns: _ColumnWriter, batch: list[Record]) -> None:
        given = [_name(record) for record in batch]
        plain = [plain_name(name) for name in given]
        self._num_escaped += sum(map(operator.ne, given, plain))
        names = [name.encode() for name in plain]
        self._name_hashes.extend(map(hash, names))
        sequences = ByteColumn.from_strings([record.sequence for record in batch])
        columns.append_strings("record_name", ByteColumn.from_strings(names))
        columns.append("record_number", np.array([record.number for record in batch], np.int64))
        columns.append("record_length", sequences.lengths)
        if self._chunk_length is None:
            self._add_whole(columns, sequences)
        else:
            self._add_frames(columns, sequences, self._chunk_length)
        self._num_records += len(batch)

    def _add_whole(self, columns: _ColumnWriter, sequences: ByteColumn) -> None:
        """Appends whole records: one chunk and one row each."""
        count = len(sequences)
        zeros = np.zeros(count, np.int64)
        rows = self._num_records + np.arange(count)
        self._add_chunks(columns, rows, zeros, zeros, sequences.lengths)
        columns.append("frame_chunk", rows)
        columns.append("frame_number", zeros.astype(np.uint8))
        columns.append("frame_start", zeros)
        columns.append_strings(self._alphabet, sequences)
        self._num_frames += count

    def _add_frames(self, columns: _ColumnWriter, sequences: ByteColumn, chunk_length: ChunkRule) -> None:
        find_frames = open_frames if self._frames == "open" else longest_stretches
        columns.append_strings("sequence", sequences)
        table = chunk_table(sequences.lengths, chunk_length)
        first_chunk = self._num_chunks
        self._add_chunks(columns, self._num_records + table.record, table.index, table.start, table.end)
        starts = sequences.offsets[table.record] + table.start
        ends = sequences.offsets[table.record] + table.end
        # A record may exceed a batch: chunks are translated in groups of about _BATCH_LETTERS.
        bounds = np.searchsorted(ends, np.arange(_BATCH_LETTERS, int(ends[-1]), _BATCH_LETTERS))
        for group in np.split(np.arange(len(ends)), np.unique(bounds)):
            if not len(group):
                continue
            left, right = int(starts[group[0]]), int(ends[group[-1]])
            frames = find_frames(sequences.data[left:right], starts[group] - left, ends[group] - left)
            columns.append("frame_chunk", first_chunk + group[0] + frames.chunk)
            columns.append("frame_number", frames.frame)
            columns.append("frame_start", frames.start)
            columns.append_strings("protein", frames.protein)
            columns.append_strings("dna", frames.dna)
            self._num_frames += len(frames)

    def _add_chunks(
        self, columns: _ColumnWriter, record: Int64, index: Int64, start: Int64, end: Int64
    ) -> None:
        columns.append("chunk_record", record)
        columns.append("chunk_index", index)
        columns.append("chunk_start", start)
        columns.append("chunk_end", end)
        self._num_chunks += len(record)

    def _make_names_unique(self) -> int:
        """Renames records whose name is already taken, and returns their number."""
        names = map_strings(self._folder, "record_name", self._num_records)
        numbers = _repeat_numbers(names, np.array(self._name_hashes, np.int64))
        rows = np.flatnonzero(numbers)
        if not len(rows):
            return 0
        example = names.rows(rows[0], rows[0] + 1).to_strings()[0]
        logger.warning(
            "%d records have the name of an earlier one, which keeps it, and get a number: the next record "
            "called %s is now %s",
            len(rows), example, _numbered(example, int(numbers[rows[0]])),
        )  # fmt: skip
        aside = self._folder / "unique_names"
        aside.mkdir()
        with _ColumnWriter(aside) as columns:
            for begin in range(0, len(names), _BLOCK_ROWS):
                block = names.rows(begin, min(begin + _BLOCK_ROWS, len(names))).to_strings()
                own = numbers[begin : begin + len(block)].tolist()
                unique = [_numbered(name, number) for name, number in zip(block, own, strict=True)]
                columns.append_strings("record_name", ByteColumn.from_strings(unique))
        for path in aside.iterdir():
            path.replace(self._folder / path.name)
        aside.rmdir()
        return len(rows)

    def _nothing_usable(self, inputs: Sequence[str | Path], rejected_copy: Path | None) -> str:
        files = ", ".join(map(str, inputs))
        if not self._num_rejected:
            return f"{files}: no sequence record found. Give FASTA or FASTQ files with at least one record."
        with open(self._folder / REJECTED_NAME, encoding="utf-8") as table:
            next(table)
            reason = next(table).rstrip("\n").split("\t")[-1]
        where = f" {rejected_copy} lists them all." if rejected_copy else ""
        return (
            f"{files}: none of the {self._num_rejected} records can be used; the first one: {reason}.{where} "
            f"Give {'nucleotide' if self._alphabet == 'dna' else 'protein'} sequences"
            f"{' or a smaller --min-length' if self._min_length else ''}."
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
        while _contains(known, hash(_numbered(name, number).encode())):
            number += 1
        numbers[row] = number
    return numbers


def _contains(ascending: Int64, value: int) -> bool:
    place = int(np.searchsorted(ascending, value))
    return place < len(ascending) and int(ascending[place]) == value
