"""Writes the tables of a run from its frame store and embeddings file, in blocks of whole contigs."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.columns import Float64
from virnuc_core.env_config import available_threads
from virnuc_core.errors import MismatchError
from virnuc_core.models.scores import ScoredRows
from virnuc_core.plain_text import cell_text
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.results.calls import (
    BALANCED,
    CALLS,
    NO_FRAME,
    NONVIRAL,
    PROVIRUS,
    UNSCORED,
    VIRUS,
    Candidates,
    ContigCalls,
    Scored,
    best_frames,
    call_contigs,
    find_candidates,
    sample_scores,
)
from virnuc_core.results.embeddings import SCORES, Embeddings
from virnuc_core.results.sample import Mixture, SampleCalls, sample_calls
from virnuc_core.results.virus_files import (
    SUMMARY_SCHEMA,
    ViralSequence,
    bed_lines,
    fasta_records,
    gff3_lines,
    summary_table,
)
from virnuc_core.results.writers import (
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
from virnuc_core.specs import FRAME_KINDS, CallRule

if TYPE_CHECKING:
    from virnuc_core.models.heads import Head

FRAME_COLUMNS: Final = ("Sequence_ID", "Prediction", "score1", "score2")
CHUNK_SCHEMA: Final = pa.schema(
    [
        ("seq_name", pa.string()),
        ("chunk", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("best_frame", pa.string()),
        ("virus_score", pa.float64()),
        ("status", pa.string()),
    ]
)
CONTIG_SCHEMA: Final = pa.schema(
    [
        ("seq_name", pa.string()),
        ("length", pa.int64()),
        ("chunks", pa.int64()),
        ("scored_chunks", pa.int64()),
        ("virus_score", pa.float64()),
        ("call", pa.string()),
        ("confidence", pa.string()),
        ("class", pa.string()),
        ("novelty", pa.float64()),
    ]
)

_Parts = dict[Path, Iterable[Any]]  # what each file gets

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCounts:
    """Counts of a run.

    Attributes:
        short_contigs: shorter than the chunks that the head is made for.
        proviruses: in all contigs.
        sample: None for heads that are not calibrated, and without any score.
    """

    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    frames: int
    short_contigs: int
    contigs_virus: int
    contigs_provirus: int
    contigs_nonviral: int
    contigs_unscored: int
    proviruses: int
    sample: SampleCalls | None


@dataclass(frozen=True, slots=True)
class _Block:
    """What the calls of whole contigs are made from; `first_contig` is the number of the first one in the store."""

    first_contig: int
    contigs: Scored
    candidates: Candidates


def write_tables(
    folder: RunFolder,
    store: FrameStore,
    head: "Head",
    rule: CallRule,
    block_chunks: int = 1 << 15,
    *,
    calibrated: bool = True,
) -> TableCounts:
    """Writes the tables of a predict run, each complete or absent.

    First the tables of frames and chunks, while contigs are scored; of these, the scores are kept. From all of them follows from
    which score contigs are called, and their tables are written. Blocks have about `block_chunks` chunks.

    Args:
        folder: of the run.
        store: its frame store.
        head: its head.
        rule: how contigs are called.
        block_chunks: chunks that are scored at a time.
        calibrated: False if the head says that its scores are no probabilities.

    Raises:
        DamagedFileError: the embeddings file is missing or corrupt.
        MismatchError: it has other rows than the store.
    """
    blocks: list[_Block] = []
    with Embeddings(folder.embeddings, own=True) as embeddings, ExitStack() as stack:
        if len(embeddings) != store.num_frames:
            raise MismatchError(
                f"{folder.embeddings} has {len(embeddings)} rows but {store.folder} {store.num_frames}: they belong to "
                "different runs. Start over with --force."
            )
        write = _open_chunk_files(folder, store, stack)
        scored = stack.enter_context(_scored_blocks(folder, store, embeddings, head, block_chunks))
        for block, parts in scored:
            for path, pieces in parts.items():
                for piece in pieces:
                    write[path](piece)
            blocks.append(block)
    scores = [sample_scores(block.contigs, block.candidates) for block in blocks]
    is_calibrated = calibrated and FRAME_KINDS[head.frames].is_calibrated
    mixture = Mixture.of(np.concatenate([np.empty(0), *scores]), rule.prior) if is_calibrated else None
    counts, sample = _write_contigs(folder, store, head, rule, blocks, mixture)
    _log.info("wrote the tables of %d chunks and %d contigs", store.num_chunks, store.num_records)
    return TableCounts(
        records=store.num_records,
        rejected=store.meta.num_rejected,
        chunks=store.num_chunks,
        scored_chunks=sum(int(block.contigs.scored_chunks.sum()) for block in blocks),
        frames=store.num_frames,
        short_contigs=_count_short(store),
        contigs_virus=counts[VIRUS],
        contigs_provirus=counts[PROVIRUS],
        contigs_nonviral=counts[NONVIRAL],
        contigs_unscored=counts[UNSCORED],
        proviruses=counts["proviruses"],
        sample=sample,
    )


def _write_contigs(
    folder: RunFolder,
    store: FrameStore,
    head: "Head",
    rule: CallRule,
    blocks: Sequence[_Block],
    mixture: Mixture | None,
) -> tuple[Counter[str], SampleCalls | None]:
    """Calls all contigs, and writes the files of contigs and viral sequences; gives how many there are of each call."""
    threshold = mixture.threshold(rule) if mixture else (rule.threshold or BALANCED)
    counts: Counter[str] = Counter()
    called: list[float] = []
    with ExitStack() as stack:
        write = _open_contig_files(folder, stack)
        classes = tuple(map(cell_text, head.classes))
        for block in blocks:
            calls = call_contigs(block.contigs, block.candidates, threshold, mixture, head.confidence_rules)
            table = _contig_table(store, block, calls, classes)
            viral = list(_viral_sequences(store, block, calls, mixture, classes))
            summary = summary_table(viral)
            write[folder.contigs](table_lines(table))
            write[folder.contigs_parquet](table)
            write[folder.summary](table_lines(summary))
            write[folder.summary_parquet](summary)
            write[folder.virus_bed](bed_lines(viral))
            write[folder.virus_gff3](gff3_lines(viral))
            for record in fasta_records(viral):
                write[folder.virus_fasta](record)
            counts.update(table["call"].to_pylist())
            called += [one.score for one in viral]
            counts["proviruses"] += sum(one.is_provirus for one in viral)
    return counts, sample_calls(mixture, threshold, np.array(called)) if mixture else None


def _count_short(store: FrameStore) -> int:
    bounds = FRAME_KINDS[store.meta.frames].chunk_bases
    return int(np.count_nonzero(store.record_length < bounds[0])) if bounds else 0


def _open_chunk_files(
    folder: RunFolder, store: FrameStore, stack: ExitStack
) -> dict[Path, Callable[[Any], object]]:
    """Opens the files of frames and chunks with their headers, and gives what writes to each; rejected.tsv is a copy."""
    write = _open_tables(stack, {folder.chunks: CHUNK_SCHEMA}, {folder.chunks_parquet: CHUNK_SCHEMA})
    write[folder.prediction_results] = stack.enter_context(open_stream(folder.prediction_results))
    write[folder.prediction_results](header_line(FRAME_COLUMNS))
    highest_header = header_line(("Modified_ID", "Is_Virus"))
    write[folder.highest_score] = stack.enter_context(open_sorted_lines(folder.highest_score, highest_header))
    with store.rejected_path.open("rb") as rejected, open_stream(folder.rejected) as write_rejected:
        for line in rejected:
            write_rejected(line)
    return write


def _open_contig_files(folder: RunFolder, stack: ExitStack) -> dict[Path, Callable[[Any], object]]:
    """Opens the files of contigs and viral sequences with their headers, and gives what writes to each."""
    write = _open_tables(
        stack,
        {folder.contigs: CONTIG_SCHEMA, folder.summary: SUMMARY_SCHEMA},
        {folder.contigs_parquet: CONTIG_SCHEMA, folder.summary_parquet: SUMMARY_SCHEMA},
    )
    for path, header in {
        folder.virus_bed: b"",
        folder.virus_gff3: b"##gff-version 3\n",
        folder.virus_fasta: b"",
    }.items():
        write[path] = stack.enter_context(open_stream(path, compress=path.suffix == ".gz"))
        write[path](header)
    return write


def _open_tables(
    stack: ExitStack, texts: Mapping[Path, pa.Schema], parquets: Mapping[Path, pa.Schema]
) -> dict[Path, Callable[[Any], object]]:
    write: dict[Path, Callable[[Any], object]] = {}
    for path, schema in texts.items():
        write[path] = stack.enter_context(open_stream(path))
        write[path](header_line(schema.names))
    for path, schema in parquets.items():
        write[path] = stack.enter_context(open_parquet(path, schema))
    return write


@contextmanager
def _scored_blocks(
    folder: RunFolder, store: FrameStore, embeddings: Embeddings, head: "Head", block_chunks: int
) -> Iterator[Iterable[tuple[_Block, _Parts]]]:
    """Scores chunk ranges that end at contig boundaries, in several threads; gives the results in order."""
    from virnuc_core.models.heads import fixed_threads  # imports torch

    def ranges() -> Iterator[tuple[int, int]]:
        begin = 0
        while begin < store.num_chunks:
            last_record = store.chunk_record[min(begin + block_chunks, store.num_chunks) - 1]
            end = int(np.searchsorted(store.chunk_record, last_record, side="right"))
            yield begin, end
            begin = end

    def score(chunks: tuple[int, int]) -> tuple[_Block, _Parts]:
        return _score_block(folder, store, embeddings, head, *chunks)

    # More would wait for the thread that writes.
    threads = min(available_threads(), 4)
    # New threads take over the number of the last one that set it.
    with fixed_threads(1), Prefetcher(score, ranges(), depth=threads, threads=threads) as found:
        yield found


def _score_block(
    folder: RunFolder, store: FrameStore, embeddings: Embeddings, head: "Head", begin: int, end: int
) -> tuple[_Block, _Parts]:
    """Scores chunks begin..end-1, which are of whole contigs; also gives what the files of frames and chunks get."""
    first, last = np.searchsorted(store.frame_chunk, (begin, end)).tolist()
    contig = store.chunk_record[begin:end] - store.chunk_record[begin]
    scores = embeddings.rows(SCORES, first, last)  # read once for rows, chunks and contigs

    def read(name: str, left: int, right: int) -> npt.NDArray[Any]:
        return scores[left:right] if name == SCORES else embeddings.rows(name, first + left, first + right)

    rows = ScoredRows(
        read=read,
        chunk=store.frame_chunk[first:last] - begin,
        contig=contig,
        num_contigs=int(contig[-1]) + 1,
    )
    found = head.score_contigs(rows)
    starts, ends = store.chunk_start[begin:end], store.chunk_end[begin:end]
    best = best_frames(rows, store.frame_number[first:last], end - begin)
    table = _chunk_table(store, begin, end, found.p_chunk, best)
    parts: _Parts = {
        folder.prediction_results: [
            frame_lines(store.frame_id_column(first + left, first + right), scores[left:right])
            for left, right in pairwise([*range(0, last - first, 1 << 16), last - first])
        ],
        folder.chunks: [table_lines(table)],
        folder.chunks_parquet: [table],
        folder.highest_score: [_highest_scores(store.chunk_id_column(begin, end), found.p_chunk)],
    }
    block = _Block(
        first_contig=int(store.chunk_record[begin]),
        contigs=Scored.of(found, contig),
        candidates=find_candidates(head, rows, found, starts, ends),
    )
    return block, parts


def _chunk_table(
    store: FrameStore, begin: int, end: int, scores: Float64, best: npt.NDArray[np.uint8]
) -> pa.Table:
    """Rows of chunks.tsv for the chunks begin..end-1; start and end are 1-based and inclusive."""
    is_scored = ~np.isnan(scores)
    columns = {
        "seq_name": store.chunk_names(begin, end),
        "chunk": store.chunk_index[begin:end] + 1,
        "start": store.chunk_start[begin:end] + 1,
        "end": store.chunk_end[begin:end],
        "best_frame": pa.array(FRAME_NAMES).take(pa.array(best, mask=best == NO_FRAME)),
        "virus_score": pa.array(scores.round(6), mask=~is_scored),
        "status": pc.if_else(pa.array(is_scored), "scored", FRAME_KINDS[store.meta.frames].missing),
    }
    return pa.table(columns, CHUNK_SCHEMA)


def _contig_table(store: FrameStore, block: _Block, calls: ContigCalls, classes: tuple[str, ...]) -> pa.Table:
    contigs = block.contigs
    rows = slice(block.first_contig, block.first_contig + len(contigs.score))
    missing = np.isnan(contigs.score)
    columns = {
        "seq_name": store.record_names(rows.start, rows.stop),
        "length": store.record_length[rows],
        "chunks": contigs.chunks,
        "scored_chunks": contigs.scored_chunks,
        "virus_score": pa.array(contigs.score, mask=missing),
        "call": pa.array(CALLS).take(pa.array(calls.call)),
        "confidence": calls.confidence.tolist(),
        "class": pa.nulls(len(missing), pa.string()),
        "novelty": pa.nulls(len(missing), pa.float64()),
    }
    if contigs.classes is not None:
        side = (calls.call == CALLS.index(VIRUS)).astype(np.int64)
        best = np.take_along_axis(contigs.classes, side[:, None], axis=1)[:, 0]
        columns["class"] = pa.array(classes).take(pa.array(best, mask=missing))
        columns["novelty"] = pa.array(contigs.novelty, from_pandas=True)
    return pa.table(columns, CONTIG_SCHEMA)


def _viral_sequences(
    store: FrameStore, block: _Block, calls: ContigCalls, mixture: Mixture | None, classes: tuple[str, ...]
) -> Iterator[ViralSequence]:
    """The viral contigs and the proviruses of a block, in the order of the input."""
    contigs, found = block.contigs, block.candidates
    viral, proviruses = np.flatnonzero(calls.call == CALLS.index(VIRUS)), np.flatnonzero(calls.is_provirus)

    def both(of_contigs: npt.NDArray[Any], of_regions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.concatenate((of_contigs[viral], of_regions[proviruses]))

    contig = both(np.arange(len(contigs.score)), found.contig)
    rows = block.first_contig + contig
    lengths = store.record_length[rows]
    score = both(contigs.score, found.scored.score)
    confidence = both(calls.confidence, calls.provirus_confidence)
    start = both(np.zeros_like(contigs.chunks), found.start)
    end = np.concatenate((lengths[: len(viral)], found.end[proviruses]))
    fdr = mixture.fdr(score).tolist() if mixture else [None] * len(score)
    best: list[str | None] = [None] * len(score)
    if contigs.classes is not None and found.scored.classes is not None:
        best = [classes[number] for number in both(contigs.classes, found.scored.classes)[:, 1].tolist()]
    for place in np.argsort(contig, kind="stable").tolist():
        row = int(rows[place])
        yield ViralSequence(
            contig=store.record_names(row, row + 1)[0],
            contig_length=int(lengths[place]),
            start=int(start[place]),
            end=int(end[place]),
            bases=store.sequence(row)[start[place] : end[place]],
            is_provirus=place >= len(viral),
            score=float(score[place]),
            fdr=fdr[place],
            virus_class=best[place],
            confidence=confidence[place],
        )


def _highest_scores(chunk_ids: pa.StringArray, scores: Float64) -> pa.Table:
    """One row per scored chunk; called at 0.5, whatever the run's own rule.

    Source: `determine_virus` in VirNucPro's prediction.py, written by pandas.
    """
    calls_at_half = pc.if_else(pa.array(scores >= 0.5), "True", "False")
    table = pa.table([chunk_ids, calls_at_half], ("chunk", "call"))
    return table.filter(pa.array(~np.isnan(scores)))


def frame_lines(ids: pa.StringArray, scores: npt.NDArray[np.float32]) -> bytes:
    """Lines of `prediction_results.txt` for scores fp32 (n, 2), with the shortest digits that give the fp32 value again.

    Source: `make_predictdata` in VirNucPro's prediction.py, which writes `str` of each fp32 score and takes the first of two
    equal scores as the label.
    """
    labels = pc.if_else(pa.array(scores[:, 1] > scores[:, 0]), "virus", "others")
    return joined_lines([ids, labels, *map(shortest_digits, scores.T)])
