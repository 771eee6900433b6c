"""Writes the tables of a run from its frame store and embeddings file, in blocks of whole contigs."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.columns import Bool, Float64
from virnuc_core.env_config import available_threads
from virnuc_core.errors import MismatchError
from virnuc_core.models.scores import ContigScores, ScoredRows
from virnuc_core.plain_text import cell_text
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.results.calls import (
    DEFAULT_THRESHOLD,
    OTHER,
    UNSCORED,
    VIRUS,
    ChunkCalls,
    ContigCalls,
    call_chunks,
    call_contigs,
)
from virnuc_core.results.embeddings import SCORES, Embeddings
from virnuc_core.results.fdr import SampleCalls, call_sample
from virnuc_core.results.regions import ChunkScores, Region, RegionFiles, find_regions
from virnuc_core.results.writers import (
    count_values,
    fasta_record,
    header_line,
    joined_lines,
    open_parquet,
    open_sorted_lines,
    open_stream,
    shortest_digits,
    table_lines,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import FRAME_KINDS, FrameRule

if TYPE_CHECKING:
    from virnuc_core.models.heads import Head

FRAME_COLUMNS: Final = ("Sequence_ID", "Prediction", "score1", "score2")
_BLOCK_CHUNKS: Final = 1 << 15

R = TypeVar("R")

_log = logging.getLogger(__name__)


def prediction_schema(frames: FrameRule) -> pa.Schema:
    """Columns of the table of chunks."""
    own = ("contig", "chunk", "start", "end", "best_frame", "p_virus", "call", "status")
    return _schema(*own, *FRAME_KINDS[frames].chunk_columns)


def contig_schema(frames: FrameRule) -> pa.Schema:
    """Columns of the table of contigs."""
    counts = ("record", "length", "chunks", "scored_chunks", "viral_chunks")
    own = ("contig", *counts, "share_viral", "mean_p", "call", "tier")
    return _schema(*own, *FRAME_KINDS[frames].contig_columns)


def _schema(*names: str) -> pa.Schema:
    texts = ("contig", "best_frame", "call", "status", "tier", "class")
    types = dict.fromkeys(texts, pa.string())
    types |= dict.fromkeys(("p_virus", "share_viral", "mean_p", "novelty"), pa.float64())
    return pa.schema([(name, types.get(name, pa.int64())) for name in names])


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCounts:
    """Counts of a run; `sample` is None for heads that are not calibrated, and without any score."""

    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    viral_chunks: int
    frames: int
    contigs_virus: int
    contigs_other: int
    contigs_unscored: int
    regions: int = 0
    sample: SampleCalls | None = None


def write_tables(
    folder: RunFolder,
    store: FrameStore,
    head: "Head",
    threshold: float = DEFAULT_THRESHOLD,
    fdr: float | None = None,
    block_chunks: int = _BLOCK_CHUNKS,
) -> TableCounts:
    """Writes the tables of a predict run, each complete or absent.

    `head` is that of the run, `threshold` the probability from which the call is virus. With `fdr`, contigs are called at this false
    discovery rate at most instead: all of them are scored before, and again for the tables, so that no more than their
    probabilities is kept. Blocks have about `block_chunks` chunks.

    Raises:
        DamagedFileError: the embeddings file is missing or corrupt.
        MismatchError: it has other rows than the store.
    """
    with ExitStack() as stack:
        embeddings = stack.enter_context(Embeddings(folder.embeddings, own=True))
        if len(embeddings) != store.num_frames:
            raise MismatchError(
                f"{folder.embeddings} has {len(embeddings)} rows and {store.folder} {store.num_frames}, "
                "so they are of different runs. Start over with --force."
            )
        sample, contig_threshold = None, threshold
        if fdr is not None:
            with scoring_contigs(head, store, embeddings, block_chunks) as blocks:
                sample = call_sample(_joined(block.p_contig for block in blocks), threshold, fdr)
            found = sample.threshold if sample else None
            contig_threshold = math.inf if found is None else found

        def call(block: tuple[int, int]) -> _Block:
            return _call_block(block, store, embeddings, head, threshold, contig_threshold)

        tables = _Tables(folder, store, threshold, stack)
        with _in_parallel(call, store, block_chunks) as called:
            for block in called:
                tables.add(block)
        if FRAME_KINDS[head.frames].is_calibrated and fdr is None:
            sample = call_sample(_joined(tables.p_call), threshold)
        write_rejected = stack.enter_context(open_stream(folder.rejected))
        with store.rejected_path.open("rb") as rejected:
            for line in rejected:
                write_rejected(line)
    _log.info("wrote the tables of %d chunks and %d contigs", store.num_chunks, store.num_records)
    return TableCounts(
        records=store.num_records,
        rejected=store.meta.num_rejected,
        chunks=store.num_chunks,
        frames=store.num_frames,
        scored_chunks=tables.counts["scored_chunks"],
        viral_chunks=tables.counts["viral_chunks"],
        contigs_virus=tables.counts[VIRUS],
        contigs_other=tables.counts[OTHER],
        contigs_unscored=tables.counts[UNSCORED],
        regions=tables.counts["regions"],
        sample=sample,
    )


def contig_blocks(store: FrameStore, block_chunks: int = _BLOCK_CHUNKS) -> Iterator[tuple[int, int]]:
    """Chunk ranges (begin, end) that end at contig boundaries."""
    begin = 0
    while begin < store.num_chunks:
        last_record = store.chunk_record[min(begin + block_chunks, store.num_chunks) - 1]
        end = int(np.searchsorted(store.chunk_record, last_record, side="right"))
        yield begin, end
        begin = end


@contextmanager
def scoring_contigs(
    head: "Head", store: FrameStore, embeddings: Embeddings, block_chunks: int = _BLOCK_CHUNKS
) -> Iterator[Iterable[ContigScores]]:
    """Gives the scores of all chunks and contigs, in `contig_blocks`, computed ahead."""

    def score(block: tuple[int, int]) -> ContigScores:
        return head.score_contigs(rows_of(store, embeddings, *block))

    with _in_parallel(score, store, block_chunks) as blocks:
        yield blocks


@contextmanager
def _in_parallel(
    function: Callable[[tuple[int, int]], R], store: FrameStore, block_chunks: int
) -> Iterator[Iterable[R]]:
    """Applies a function to `contig_blocks` in several threads, and gives the results in order."""
    from virnuc_core.models.heads import fixed_threads  # imports torch

    # More would wait for the thread that writes.
    threads = min(available_threads(), 4)
    # New threads take over the number of the last one that set it.
    with (
        fixed_threads(1),
        Prefetcher(function, contig_blocks(store, block_chunks), depth=threads, threads=threads) as found,
    ):
        yield found


def rows_of(store: FrameStore, embeddings: Embeddings, begin: int, end: int) -> ScoredRows:
    """The rows of chunks begin..end-1, which are of whole contigs."""
    first, last = np.searchsorted(store.frame_chunk, (begin, end)).tolist()
    contig = store.chunk_record[begin:end] - store.chunk_record[begin]
    scores = embeddings.rows(SCORES, first, last)  # read once for rows, chunks and contigs

    def read(name: str, left: int, right: int) -> npt.NDArray[Any]:
        return scores[left:right] if name == SCORES else embeddings.rows(name, first + left, first + right)

    return ScoredRows(
        read=read,
        chunk=store.frame_chunk[first:last] - begin,
        contig=contig,
        num_contigs=int(contig[-1]) + 1,
    )


def _joined(blocks: Iterable[Float64]) -> Float64:
    return np.concatenate([np.empty(0), *blocks])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Whole contigs, called, and what the tables say of them.

    Attributes:
        first_contig: number in the store.
        frame_lines: of prediction_results.txt, in pieces.
    """

    first_contig: int
    frame_lines: list[bytes]
    chunk_calls: ChunkCalls
    chunks: pa.Table
    chunk_lines: bytes
    highest_scores: pa.Table
    contig_calls: ContigCalls
    contigs: pa.Table
    contig_lines: bytes
    regions: list[Region]


def _call_block(
    block: tuple[int, int],
    store: FrameStore,
    embeddings: Embeddings,
    head: "Head",
    threshold: float,
    contig_threshold: float,
) -> _Block:
    """Calls chunks begin..end-1 virus from `threshold` on, and their contigs from `contig_threshold` on."""
    begin, end = block
    first, last = np.searchsorted(store.frame_chunk, block).tolist()
    first_contig = int(store.chunk_record[begin])
    rows = rows_of(store, embeddings, begin, end)
    found = head.score_contigs(rows)
    chunks = call_chunks(rows, store.frame_number[first:last], found, threshold)
    contigs = call_contigs(chunks, rows.contig, found, head.tier_rules, contig_threshold)
    classes = tuple(map(cell_text, head.classes))
    starts, ends = store.chunk_start[begin:end], store.chunk_end[begin:end]
    spans = ChunkScores(contig=rows.contig, start=starts, end=ends, p_virus=chunks.p_region)
    chunk_table = _prediction_table(store, begin, end, chunks, classes)
    contig_table = _contig_table(store, first_contig, contigs, classes)
    lines = []
    for left in range(0, last - first, 1 << 16):
        right = min(left + (1 << 16), last - first)
        ids = store.frame_id_column(first + left, first + right)
        lines.append(frame_lines(ids, rows.read(SCORES, left, right)))
    return _Block(
        first_contig=first_contig,
        frame_lines=lines,
        chunk_calls=chunks,
        chunks=chunk_table,
        chunk_lines=table_lines(chunk_table, threshold),
        highest_scores=_highest_scores(store.chunk_id_column(begin, end), chunks),
        contig_calls=contigs,
        contigs=contig_table,
        contig_lines=table_lines(contig_table, contig_threshold),
        regions=find_regions(spans, threshold=threshold),
    )


class _Tables:
    def __init__(self, folder: RunFolder, store: FrameStore, threshold: float, stack: ExitStack) -> None:
        self.counts: Counter[str] = Counter()
        self.p_call: list[Float64] = []
        self._store = store
        enter = stack.enter_context
        of_chunks, of_contigs = prediction_schema(store.meta.frames), contig_schema(store.meta.frames)
        self._write_chunks = enter(open_stream(folder.predictions))
        self._append_chunks = enter(open_parquet(folder.predictions_parquet, of_chunks))
        self._write_contigs = enter(open_stream(folder.contigs))
        self._append_contigs = enter(open_parquet(folder.contigs_parquet, of_contigs))
        self._write_viral = enter(open_stream(folder.viral_contigs, compress=True))
        self._regions = RegionFiles(folder, stack, threshold)
        self._write_frames = enter(open_stream(folder.prediction_results))
        highest_header = header_line(("Modified_ID", "Is_Virus"))
        self._append_highest = enter(open_sorted_lines(folder.highest_score, highest_header))
        self._write_chunks(header_line(of_chunks.names))
        self._write_contigs(header_line(of_contigs.names))
        self._write_frames(header_line(FRAME_COLUMNS))

    def add(self, block: _Block) -> None:
        """Writes chunks, contigs, frames and regions of a block."""
        for lines in block.frame_lines:
            self._write_frames(lines)
        self._write_chunks(block.chunk_lines)
        self._append_chunks(block.chunks)
        self._append_highest(block.highest_scores)
        self._write_contigs(block.contig_lines)
        self._append_contigs(block.contigs)
        self.counts.update(count_values(block.contigs["call"]))
        self.counts.update(
            scored_chunks=int(block.chunk_calls.is_scored.sum()),
            viral_chunks=int(block.chunk_calls.is_virus.sum()),
            regions=len(block.regions),
        )
        self.p_call.append(block.contig_calls.p_call)

        def sequence_of(contig: int) -> bytes:
            return self._store.sequence(block.first_contig + contig)

        names = block.contigs["contig"].to_pylist()
        for contig in np.flatnonzero(block.contig_calls.is_virus).tolist():
            self._write_viral(fasta_record(names[contig], sequence_of(contig)))
        self._regions.extend(block.regions, names, block.contigs["length"].to_pylist(), sequence_of)


def _prediction_table(
    store: FrameStore, begin: int, end: int, calls: ChunkCalls, classes: tuple[str, ...]
) -> pa.Table:
    """Rows of predictions.tsv for the chunks begin..end-1; start and end are 1-based and inclusive."""
    is_scored, schema = calls.is_scored, prediction_schema(store.meta.frames)
    columns: dict[str, Any] = {
        "contig": store.chunk_names(begin, end),
        "chunk": store.chunk_index[begin:end] + 1,
        "start": store.chunk_start[begin:end] + 1,
        "end": store.chunk_end[begin:end],
        "best_frame": pa.array(FRAME_NAMES).take(pa.array(calls.best_frame, mask=~is_scored)),
        "p_virus": pa.array(calls.p_virus, mask=~is_scored),
        "call": _call_names(is_scored, calls.is_virus),
        "status": pc.if_else(pa.array(is_scored), "scored", FRAME_KINDS[store.meta.frames].missing),
    }
    if calls.classes is not None:
        columns["class"] = pa.array(classes).take(pa.array(calls.classes, mask=~is_scored))
    return pa.table(columns, schema)


def _contig_table(store: FrameStore, first: int, calls: ContigCalls, classes: tuple[str, ...]) -> pa.Table:
    rows = slice(first, first + len(calls.chunks))
    is_scored = calls.scored_chunks > 0
    columns: dict[str, Any] = {
        "contig": store.record_names(rows.start, rows.stop),
        "record": store.record_number[rows],
        "length": store.record_length[rows],
        "chunks": calls.chunks,
        "scored_chunks": calls.scored_chunks,
        "viral_chunks": calls.viral_chunks,
        "share_viral": pa.array(calls.viral_chunks / np.maximum(calls.scored_chunks, 1), mask=~is_scored),
        "mean_p": pa.array(calls.mean_p, mask=~is_scored),
        "call": _call_names(is_scored, calls.is_virus),
        "tier": calls.tiers,
    }
    if calls.classes is not None:
        columns["p_virus"] = pa.array(calls.p_call, mask=~is_scored)
        columns["class"] = pa.array(classes).take(pa.array(calls.classes, mask=~is_scored))
        columns["novelty"] = pa.array(calls.novelty, from_pandas=True)
    return pa.table(columns, contig_schema(store.meta.frames))


def _call_names(is_scored: Bool, is_virus: Bool) -> pa.StringArray:
    return pc.if_else(pa.array(is_scored), pc.if_else(pa.array(is_virus), VIRUS, OTHER), UNSCORED)


def _highest_scores(chunk_ids: pa.StringArray, calls: ChunkCalls) -> pa.Table:
    """One row per scored chunk; called at 0.5, whatever the run's own threshold.

    Source: `determine_virus` in VirNucPro's prediction.py, written by pandas.
    """
    calls_at_half = pc.if_else(pa.array(calls.p_virus >= 0.5), "True", "False")
    table = pa.table([chunk_ids, calls_at_half], ("chunk", "call"))
    return table.filter(pa.array(calls.is_scored))


def frame_lines(ids: pa.StringArray, scores: npt.NDArray[np.float32]) -> bytes:
    """Lines of `prediction_results.txt` for scores fp32 (n, 2), with the shortest digits that give the fp32 value again.

    Source: `make_predictdata` in VirNucPro's prediction.py, which writes `str` of each fp32 score and takes the first of two
    equal scores as the label.
    """
    labels = pc.if_else(pa.array(scores[:, 1] > scores[:, 0]), "virus", "others")
    return joined_lines([ids, labels, *map(shortest_digits, scores.T)])
