"""The tables of a run, written from its frame store and embeddings file, some whole contigs at a time."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import MismatchError
from virnuc_core.results.chunk_tables import (
    FRAME_COLUMNS,
    HIGHEST_SCORE_COLUMNS,
    PREDICTION_COLUMNS,
    PREDICTION_SCHEMA,
    frame_rows,
    highest_score_rows,
    prediction_table,
)
from virnuc_core.results.contig_tables import CONTIG_COLUMNS, CONTIG_SCHEMA, contig_table, viral_records
from virnuc_core.results.embeddings_file import SCORES, EmbeddingsFile
from virnuc_core.results.region_files import RegionFiles
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.result_sinks import ResultSinks, WritingSinks
from virnuc_core.results.text_table import header_line, text_lines
from virnuc_core.results.verdicts import DEFAULT_THRESHOLD, ChunkVerdicts, call_chunks, sum_contigs
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import DNA_ALONE

_BLOCK_CHUNKS: Final = 1 << 16

_WRITING: Final = WritingSinks()
_COUNTED: Final = (
    "scored_chunks",
    "dna_alone_chunks",
    "viral_chunks",
    "contigs_virus",
    "contigs_other",
    "contigs_unscored",
    "regions",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCounts:
    """How many of what a run has found; scored chunks are those with an open frame and those by their DNA alone."""

    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    dna_alone_chunks: int = 0
    viral_chunks: int
    frames: int
    contigs_virus: int
    contigs_other: int
    contigs_unscored: int
    regions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """The chunks begin..end-1, which are all those of some contigs, with their calls and the scores of their frames.

    Attributes:
        begin: first chunk.
        end: one past the last.
        first_record: row of the first contig.
        num_records: contigs.
        verdicts: on the chunks.
        frame_ids: ids of the n open frames.
        scores: fp32 (n, 2), of these.
    """

    begin: int
    end: int
    first_record: int
    num_records: int
    verdicts: ChunkVerdicts
    frame_ids: list[str]
    scores: npt.NDArray[np.float32]


def write_tables(
    folder: RunFolder,
    store: FrameStore,
    threshold: float = DEFAULT_THRESHOLD,
    sinks: ResultSinks = _WRITING,
) -> TableCounts:
    """Writes the tables of a predict run; each is whole or absent.

    Args:
        folder: the run's folder, with its embeddings file.
        store: the run's frame store.
        threshold: p_virus from which chunks and contigs are called virus.
        sinks: where the tables go; by default into their files.

    Raises:
        DamagedFileError: the embeddings file is missing or not whole.
        MismatchError: it has other rows than the store.
    """
    with ExitStack() as stack:
        embeddings = stack.enter_context(EmbeddingsFile(folder.embeddings))
        if embeddings.num_rows != store.num_frames:
            raise MismatchError(
                f"{folder.embeddings} has {embeddings.num_rows} rows and {store.folder} {store.num_frames}, "
                "so they are of different runs. Start over with --force."
            )
        tables = _Tables(folder, store, threshold, sinks, stack)
        for block in _blocks(store, embeddings, threshold):
            tables.add(block)
        with store.rejected_path.open(encoding="utf-8", newline="\n") as rejected:
            shutil.copyfileobj(rejected, stack.enter_context(sinks.text(folder.rejected)))
    _log.info("made the tables of %d chunks and %d contigs", store.num_chunks, store.num_records)
    return TableCounts(
        records=store.num_records,
        rejected=store.meta.num_rejected,
        chunks=store.num_chunks,
        frames=store.num_frames - store.meta.num_closed,
        **tables.counts,
    )


def _blocks(store: FrameStore, embeddings: EmbeddingsFile, threshold: float) -> Iterator[_Block]:
    """All chunks, in blocks that end where a contig does."""
    begin = 0
    while begin < store.num_chunks:
        first_record = int(store.chunk_record[begin])
        last_record = int(store.chunk_record[min(begin + _BLOCK_CHUNKS, store.num_chunks) - 1])
        end = int(np.searchsorted(store.chunk_record, last_record, side="right"))
        first, last = np.searchsorted(store.frame_chunk, (begin, end)).tolist()
        scores = embeddings.rows(SCORES, first, last)
        chunks, numbers = store.frame_chunk[first:last] - begin, store.frame_number[first:last]
        is_frame = numbers != DNA_ALONE
        yield _Block(
            begin=begin,
            end=end,
            first_record=first_record,
            num_records=last_record + 1 - first_record,
            verdicts=call_chunks(scores, chunks, numbers, end - begin, threshold),
            frame_ids=list(compress(store.frame_ids(first, last), is_frame)),
            scores=scores[is_frame],
        )
        begin = end


class _Tables:
    """All tables while they are written.

    Args:
        folder: the run's folder.
        store: the run's frame store.
        threshold: p_virus from which chunks and contigs are called virus.
        sinks: open the files.
        stack: closes them.

    Attributes:
        counts: what was found, by the names of `TableCounts`.
    """

    def __init__(
        self, folder: RunFolder, store: FrameStore, threshold: float, sinks: ResultSinks, stack: ExitStack
    ) -> None:
        self.counts = dict.fromkeys(_COUNTED, 0)
        self._store = store
        self._threshold = threshold
        enter = stack.enter_context
        self._chunks = enter(sinks.text(folder.predictions))
        self._chunks_parquet = enter(sinks.parquet(folder.predictions_parquet, PREDICTION_SCHEMA))
        self._contigs = enter(sinks.text(folder.contigs))
        self._contigs_parquet = enter(sinks.parquet(folder.contigs_parquet, CONTIG_SCHEMA))
        self._viral = enter(sinks.gzip(folder.viral_contigs))
        self._regions = RegionFiles(folder, sinks, stack, threshold)
        self._frames = enter(sinks.text(folder.prediction_results))
        self._highest = enter(sinks.sorted_text(folder.highest_score, header_line(HIGHEST_SCORE_COLUMNS)))
        self._chunks.write(header_line(PREDICTION_COLUMNS))
        self._contigs.write(header_line(CONTIG_COLUMNS))
        self._frames.write(header_line(FRAME_COLUMNS))

    def add(self, block: _Block) -> None:
        """Writes the rows of the next chunks, and of the contigs that they make up."""
        chunks = prediction_table(self._store, block.begin, block.end, block.verdicts)
        self._chunks.writelines(text_lines(chunks, self._threshold))
        self._chunks_parquet.append(chunks)
        self._frames.writelines(frame_rows(block.frame_ids, block.scores))
        self._highest.extend(highest_score_rows(self._store, block.begin, block.end, block.verdicts))
        self.counts["scored_chunks"] += int(block.verdicts.is_scored.sum())
        self.counts["dna_alone_chunks"] += int(block.verdicts.is_dna_alone.sum())
        self.counts["viral_chunks"] += int(block.verdicts.is_virus.sum())
        self._add_contigs(block)

    def _add_contigs(self, block: _Block) -> None:
        chunks = slice(block.begin, block.end)
        contig = self._store.chunk_record[chunks] - block.first_record
        totals = sum_contigs(block.verdicts, contig, block.num_records)
        contigs = contig_table(self._store, block.first_record, totals, self._threshold)
        self._contigs.writelines(text_lines(contigs, self._threshold))
        self._contigs_parquet.append(contigs)
        for record in viral_records(self._store, block.first_record, contigs, self._threshold):
            self._viral.write(record)
        for call in contigs["call"].to_pylist():
            self.counts[f"contigs_{call}"] += 1
        scores = ChunkScores(
            contig=contig,
            start=self._store.chunk_start[chunks],
            end=self._store.chunk_end[chunks],
            p_virus=block.verdicts.p_virus,
            is_dna_alone=block.verdicts.is_dna_alone,
        )
        regions = find_regions(scores, threshold=self._threshold)
        self._regions.extend(
            regions,
            contigs["contig"].to_pylist(),
            contigs["length"].to_pylist(),
            lambda row: self._store.sequence(block.first_record + row),
        )
        self.counts["regions"] += len(regions)
