"""Writes the tables of a run from its frame store and embeddings file, in blocks of whole contigs."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.columns import Bool, Float64
from virnuc_core.env_config import available_threads
from virnuc_core.errors import MismatchError
from virnuc_core.models.scores import ScoredRows
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
from virnuc_core.results.regions import REGION_SCHEMA, ChunkScores, find_regions, region_files
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
_NOTHING: Final = np.empty(0)

R = TypeVar("R")
_Block = tuple[
    dict[Path, Iterable[Any]], Counter[str], Float64
]  # what each file gets, counts, and p_virus of contigs

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
    scored_chunks: int = 0
    viral_chunks: int = 0
    frames: int
    contigs_virus: int = 0
    contigs_other: int = 0
    contigs_unscored: int = 0
    regions: int = 0
    sample: SampleCalls | None = None


def write_tables(
    folder: RunFolder,
    store: FrameStore,
    head: "Head",
    threshold: float = DEFAULT_THRESHOLD,
    fdr: float | None = None,
    block_chunks: int = 1 << 15,
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

            def score(block: tuple[int, int]) -> Float64:
                return head.score_contigs(rows_of(store, embeddings, *block)).p_contig

            with _in_parallel(score, store, block_chunks) as scored:
                sample = call_sample(np.concatenate([_NOTHING, *scored]), threshold, fdr)
            contig_threshold = sample.threshold if sample and sample.threshold is not None else math.inf

        def call(block: tuple[int, int]) -> _Block:
            return _call_block(block, folder, store, embeddings, head, threshold, contig_threshold)

        write = _open_files(folder, store, stack)
        counts: Counter[str] = Counter()
        p_contig = [_NOTHING]
        with _in_parallel(call, store, block_chunks) as called:
            for parts, more, p_virus in called:
                for path, pieces in parts.items():
                    for piece in pieces:
                        write[path](piece)
                counts += more
                p_contig.append(p_virus)
        if FRAME_KINDS[head.frames].is_calibrated and fdr is None:
            sample = call_sample(np.concatenate(p_contig), threshold)
    _log.info("wrote the tables of %d chunks and %d contigs", store.num_chunks, store.num_records)
    return TableCounts(
        records=store.num_records,
        rejected=store.meta.num_rejected,
        chunks=store.num_chunks,
        frames=store.num_frames,
        sample=sample,
        **counts,
    )


def _open_files(
    folder: RunFolder, store: FrameStore, stack: ExitStack
) -> dict[Path, Callable[[Any], object]]:
    """Opens all files with their headers, and gives what writes to each; rejected.tsv is a copy."""
    of_chunks, of_contigs = prediction_schema(store.meta.frames), contig_schema(store.meta.frames)
    headers = {
        folder.predictions: header_line(of_chunks.names),
        folder.contigs: header_line(of_contigs.names),
        folder.prediction_results: header_line(FRAME_COLUMNS),
        folder.viral_contigs: b"",
        folder.regions: header_line(REGION_SCHEMA.names),
        folder.regions_bed: b"",
        folder.regions_gff3: b"##gff-version 3\n",
        folder.regions_fasta: b"",
    }
    schemas = {
        folder.predictions_parquet: of_chunks,
        folder.contigs_parquet: of_contigs,
        folder.regions_parquet: REGION_SCHEMA,
    }
    write: dict[Path, Callable[[Any], object]] = {}
    for path, header in headers.items():
        write[path] = stack.enter_context(open_stream(path, compress=path.suffix == ".gz"))
        write[path](header)
    for path, schema in schemas.items():
        write[path] = stack.enter_context(open_parquet(path, schema))
    with store.rejected_path.open("rb") as rejected, open_stream(folder.rejected) as write_rejected:
        for line in rejected:
            write_rejected(line)
    highest_header = header_line(("Modified_ID", "Is_Virus"))
    write[folder.highest_score] = stack.enter_context(open_sorted_lines(folder.highest_score, highest_header))
    return write


@contextmanager
def _in_parallel(
    function: Callable[[tuple[int, int]], R], store: FrameStore, block_chunks: int
) -> Iterator[Iterable[R]]:
    """Applies a function to chunk ranges that end at contig boundaries, in several threads; gives the results in order."""
    from virnuc_core.models.heads import fixed_threads  # imports torch

    def blocks() -> Iterator[tuple[int, int]]:
        begin = 0
        while begin < store.num_chunks:
            last_record = store.chunk_record[min(begin + block_chunks, store.num_chunks) - 1]
            end = int(np.searchsorted(store.chunk_record, last_record, side="right"))
            yield begin, end
            begin = end

    # More would wait for the thread that writes.
    threads = min(available_threads(), 4)
    # New threads take over the number of the last one that set it.
    with (
        fixed_threads(1),
        Prefetcher(function, blocks(), depth=threads, threads=threads) as found,
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


def _call_block(
    block: tuple[int, int],
    folder: RunFolder,
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
    regions = find_regions(
        ChunkScores(contig=rows.contig, start=starts, end=ends, p_virus=found.p_region), threshold
    )
    chunk_table = _prediction_table(store, begin, end, chunks, classes)
    contig_table = _contig_table(store, first_contig, contigs, found.novelty, classes)
    names, lengths = contig_table["contig"].to_pylist(), contig_table["length"].to_pylist()

    def sequence_of(contig: int) -> bytes:
        return store.sequence(first_contig + contig)

    counts = Counter(
        scored_chunks=int(chunks.is_scored.sum()),
        viral_chunks=int(chunks.is_virus.sum()),
        regions=len(regions),
        **{f"contigs_{call}": number for call, number in count_values(contig_table["call"]).items()},
    )
    parts: dict[Path, Iterable[Any]] = {
        folder.prediction_results: [
            frame_lines(store.frame_id_column(first + left, first + right), rows.read(SCORES, left, right))
            for left, right in pairwise([*range(0, last - first, 1 << 16), last - first])
        ],
        folder.predictions: [table_lines(chunk_table, threshold)],
        folder.predictions_parquet: [chunk_table],
        folder.highest_score: [_highest_scores(store.chunk_id_column(begin, end), chunks)],
        folder.contigs: [table_lines(contig_table, contig_threshold)],
        folder.contigs_parquet: [contig_table],
        folder.viral_contigs: (
            fasta_record(names[contig], sequence_of(contig))
            for contig in np.flatnonzero(contigs.is_virus).tolist()
        ),
        **region_files(folder, regions, names, lengths, sequence_of, threshold),
    }
    return parts, counts, contigs.p_call


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


def _contig_table(
    store: FrameStore, first: int, calls: ContigCalls, novelty: Float64 | None, classes: tuple[str, ...]
) -> pa.Table:
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
        columns["novelty"] = pa.array(novelty, from_pandas=True)
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
