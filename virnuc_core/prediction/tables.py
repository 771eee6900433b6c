"""The tables of a run, written from its frame store and embeddings file, a block of chunks at a time."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt

from virnuc_core.atomic_write import atomic_path
from virnuc_core.errors import MismatchError
from virnuc_core.prediction.embeddings_file import SCORES, EmbeddingsFile
from virnuc_core.prediction.sorted_lines import SortedLines
from virnuc_core.prediction.verdicts import (
    OTHER,
    UNSCORED,
    VIRUS,
    ChunkVerdicts,
    call_chunks,
    call_contig,
    sum_contigs,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.translation import FRAME_NAMES

PREDICTION_COLUMNS: Final = ("contig", "chunk", "start", "end", "best_frame", "p_virus", "call", "status")
CONTIG_COLUMNS: Final = (
    "contig",
    "record",
    "length",
    "chunks",
    "scored_chunks",
    "viral_chunks",
    "share_viral",
    "mean_p",
    "call",
)
FRAME_COLUMNS: Final = ("Sequence_ID", "Prediction", "score1", "score2")
HIGHEST_SCORE_COLUMNS: Final = ("Modified_ID", "Is_Virus")
NOT_AVAILABLE: Final = "NA"
_BLOCK_CHUNKS: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCounts:
    """How many of what a run has found."""

    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    viral_chunks: int
    frames: int
    contigs_virus: int
    contigs_other: int
    contigs_unscored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """The chunks begin..end-1 with their calls, and the ids and scores of their frames."""

    begin: int
    end: int
    verdicts: ChunkVerdicts
    frame_ids: list[str]
    scores: npt.NDArray[np.float32]


def write_tables(folder: RunFolder, store: FrameStore) -> TableCounts:
    """Writes the five tables of a predict run; each is whole or absent.

    Args:
        folder: the run's folder, with its embeddings file.
        store: the run's frame store.

    Raises:
        DamagedFileError: the embeddings file is missing or not whole.
        MismatchError: it has other rows than the store.
    """
    scored_chunks = viral_chunks = 0
    with ExitStack() as stack:
        embeddings = stack.enter_context(EmbeddingsFile(folder.embeddings))
        if embeddings.num_rows != store.num_frames:
            raise MismatchError(
                f"{folder.embeddings} has {embeddings.num_rows} rows and {store.folder} {store.num_frames} "
                "frames, so they are of different runs. Start over with --force."
            )
        chunk_table = stack.enter_context(open_table(folder.predictions, PREDICTION_COLUMNS))
        contig_table = stack.enter_context(open_table(folder.contigs, CONTIG_COLUMNS))
        frame_table = stack.enter_context(open_table(folder.prediction_results, FRAME_COLUMNS))
        highest_table = stack.enter_context(open_table(folder.highest_score, HIGHEST_SCORE_COLUMNS))
        highest = stack.enter_context(SortedLines(folder.root))
        contigs = _ContigTable(store, contig_table)
        for block in _blocks(store, embeddings):
            chunk_table.writelines(_chunk_rows(store, block))
            frame_table.writelines(frame_rows(block.frame_ids, block.scores))
            highest.extend(_highest_rows(store, block))
            contigs.add(block)
            scored_chunks += int(block.verdicts.is_scored.sum())
            viral_chunks += int(block.verdicts.is_virus.sum())
        contigs.finish()
        highest_table.writelines(highest)
    with atomic_path(folder.rejected) as temporary:
        shutil.copyfile(store.rejected_path, temporary)
    _log.info("wrote the tables of %d chunks and %d contigs", store.num_chunks, store.num_records)
    return TableCounts(
        records=store.num_records,
        rejected=store.meta.num_rejected,
        chunks=store.num_chunks,
        scored_chunks=scored_chunks,
        viral_chunks=viral_chunks,
        frames=store.num_frames,
        contigs_virus=contigs.calls[VIRUS],
        contigs_other=contigs.calls[OTHER],
        contigs_unscored=contigs.calls[UNSCORED],
    )


@contextmanager
def open_table(path: Path, columns: tuple[str, ...]) -> Iterator[TextIO]:
    """A tab-separated file, with its header, that appears when the block has ended without an error."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(columns) + "\n")
        yield file


def frame_rows(ids: list[str], scores: npt.NDArray[np.float32]) -> Iterator[str]:
    """Lines of `prediction_results.txt`: the shortest digits that give the fp32 value again.

    Source: `make_predictdata` in VirNucPro's prediction.py, which writes `str` of each fp32 score and takes
    the first of two equal scores as the label.
    """
    labels = np.where(scores[:, 1] > scores[:, 0], "virus", "others").tolist()
    for name, label, (other, virus) in zip(ids, labels, scores, strict=True):
        yield f"{name}\t{label}\t{other!s}\t{virus!s}\n"


def _blocks(store: FrameStore, embeddings: EmbeddingsFile) -> Iterator[_Block]:
    for begin in range(0, store.num_chunks, _BLOCK_CHUNKS):
        end = min(begin + _BLOCK_CHUNKS, store.num_chunks)
        first, last = np.searchsorted(store.frame_chunk, (begin, end)).tolist()
        scores = embeddings.rows(SCORES, first, last)
        chunks = store.frame_chunk[first:last] - begin
        yield _Block(
            begin=begin,
            end=end,
            verdicts=call_chunks(scores, chunks, store.frame_number[first:last], end - begin),
            frame_ids=store.frame_ids(first, last),
            scores=scores,
        )


def _chunk_rows(store: FrameStore, block: _Block) -> Iterator[str]:
    """Lines of predictions.tsv; start and end are 1-based and inclusive."""
    chunks = slice(block.begin, block.end)
    records = store.chunk_record[chunks]
    first = int(records[0])
    names = store.record_names(first, int(records[-1]) + 1)
    columns = zip(
        (records - first).tolist(),
        store.chunk_index[chunks].tolist(),
        store.chunk_start[chunks].tolist(),
        store.chunk_end[chunks].tolist(),
        *_verdict_columns(block.verdicts),
        strict=True,
    )
    for record, index, start, end, is_scored, is_virus, p_virus, frame in columns:
        where = f"{names[record]}\t{index + 1}\t{start + 1}\t{end}"
        if is_scored:
            call = VIRUS if is_virus else OTHER
            yield f"{where}\t{FRAME_NAMES[frame]}\t{p_virus:.6f}\t{call}\tscored\n"
        else:
            yield f"{where}\t{NOT_AVAILABLE}\t{NOT_AVAILABLE}\t{UNSCORED}\tno_open_frame\n"


def _verdict_columns(verdicts: ChunkVerdicts) -> tuple[list[bool], list[bool], list[float], list[int]]:
    return (
        verdicts.is_scored.tolist(),
        verdicts.is_virus.tolist(),
        verdicts.p_virus.tolist(),
        verdicts.best_frame.tolist(),
    )


def _highest_rows(store: FrameStore, block: _Block) -> Iterator[str]:
    """Lines of prediction_results_highestscore.csv, unsorted: one for each scored chunk.

    Source: `determine_virus` in VirNucPro's prediction.py, written by pandas.
    """
    ids = store.chunk_ids(block.begin, block.end)
    verdicts = block.verdicts
    for row in np.flatnonzero(verdicts.is_scored).tolist():
        yield f"{ids[row]}\t{bool(verdicts.is_virus[row])}\n"


class _ContigTable:
    """Writes contigs.tsv while the blocks go by; the last contig of a block may go on in the next.

    Attributes:
        calls: contigs by call.
    """

    def __init__(self, store: FrameStore, table: TextIO) -> None:
        self.calls = {VIRUS: 0, OTHER: 0, UNSCORED: 0}
        self._store = store
        self._table = table
        self._open = -1
        self._totals = (0, 0, 0, 0.0)

    def add(self, block: _Block) -> None:
        """Takes in the next chunks."""
        records = self._store.chunk_record[block.begin : block.end]
        first = int(records[0])
        num_records = int(records[-1]) + 1 - first
        sums = sum_contigs(block.verdicts, records - first, num_records)
        columns = (sums.chunks, sums.scored_chunks, sums.viral_chunks, sums.p_sum)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        if self._open == first:
            chunks, scored, viral, p_sum = (a + b for a, b in zip(self._totals, rows[0], strict=True))
            rows[0] = (chunks, scored, viral, p_sum)
        else:
            self.finish()
        self._write(first, rows[:-1])
        self._open, self._totals = first + num_records - 1, rows[-1]

    def finish(self) -> None:
        """Writes the contig that was still open."""
        if self._open >= 0:
            self._write(self._open, [self._totals])

    def _write(self, first: int, rows: list[tuple[int, int, int, float]]) -> None:
        records = slice(first, first + len(rows))
        names = self._store.record_names(first, first + len(rows))
        numbers = self._store.record_number[records].tolist()
        lengths = self._store.record_length[records].tolist()
        for name, number, length, (chunks, scored, viral, p_sum) in zip(
            names, numbers, lengths, rows, strict=True
        ):
            call = call_contig(scored, p_sum)
            self.calls[call] += 1
            share, mean = NOT_AVAILABLE, NOT_AVAILABLE
            if scored:
                share, mean = f"{viral / scored:.6f}", f"{p_sum / scored:.6f}"
            self._table.write(
                f"{name}\t{number}\t{length}\t{chunks}\t{scored}\t{viral}\t{share}\t{mean}\t{call}\n"
            )
