"""The tables and the run.json of a finished run, written by hand: what a report is made from."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from virnuc_core.results.fdr import SampleCalls

from tests.made_lanes import counters, report
from tests.made_plans import PLAN
from virnuc_core.results.regions import REGION_SCHEMA
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import TableCounts, contig_schema, prediction_schema
from virnuc_core.results.writers import header_line, table_lines
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import chunk_table
from virnuc_core.specs import FRAME_KINDS, ChunkRule, FrameRule

CHUNK_LENGTH = 500
CLASS_OF_CALL = {"virus": "prokaryotic virus", "other": "bacterium", "unscored": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeContig:
    """A contig by the scores of its chunks, None for one without a score; regions are (start, end).

    The class of a contig is of runs over the longest stretches.
    """

    name: str
    p_virus: tuple[float | None, ...]
    regions: tuple[tuple[int, int], ...] = ()
    tier: str = "likely"
    length: int | None = None

    @property
    def bases(self) -> int:
        return CHUNK_LENGTH * len(self.p_virus) if self.length is None else self.length

    @property
    def scored(self) -> list[float]:
        return [p for p in self.p_virus if p is not None]

    @property
    def call(self) -> str:
        if not self.scored:
            return "unscored"
        return "virus" if sum(self.scored) / len(self.scored) >= 0.5 else "other"


def slow_lines(table: pa.Table, threshold: float) -> str:
    """A table as text, cell by cell: numbers on their own side of the threshold, nulls as NA."""

    def cell(value: object) -> str:
        if not isinstance(value, float):
            return "NA" if value is None else str(value)
        text = f"{value:.6f}"
        if abs(value - threshold) < 1e-6 and (float(text) >= threshold) != (value >= threshold):
            return f"{float(text) + (1e-6 if value >= threshold else -1e-6):.6f}"
        return text

    rows = [table.schema.names, *(map(cell, row.values()) for row in table.to_pylist())]
    return "".join("\t".join(row) + "\n" for row in rows)


def island(name: str, begin: int = 40, end: int = 60, chunks: int = 120) -> MadeContig:
    """A contig with a viral part: chunks begin to end - 1; each third chunk has no stop-free frame."""
    inside = [begin <= i < end for i in range(chunks)]
    p_virus = tuple(None if i % 3 == 2 else 0.9 if inside[i] else 0.1 for i in range(chunks))
    region = (begin * CHUNK_LENGTH + 1, end * CHUNK_LENGTH)
    return MadeContig(name=name, p_virus=p_virus, regions=(region,))


def many_contigs(number: int, chunks: int = 5) -> list[MadeContig]:
    """Contigs of random scores; each seventh has no stop-free frame."""
    generator = random.Random(1)
    return [
        MadeContig(
            name=f"contig_{i}",
            p_virus=tuple(generator.random() if i % 7 else None for _ in range(chunks)),
            tier=generator.choice(["confident", "likely", "unsure"]),
            length=CHUNK_LENGTH * chunks - i % CHUNK_LENGTH,
        )
        for i in range(number)
    ]


def write_run(
    root: Path,
    contigs: Sequence[MadeContig],
    *,
    rejected: Iterable[tuple[str, ...]] = (),
    links: dict[str, str] | None = None,
    frames: FrameRule = "open",
    sample: SampleCalls | None = None,
    chunk_length: ChunkRule = CHUNK_LENGTH,
) -> tuple[RunFolder, dict[str, Any]]:
    """Writes the tables; gives the folder and the content of its run.json."""
    folder = RunFolder(root)
    rejected = list(rejected)
    of_chunks = _chunk_rows(contigs, frames, chunk_length)
    for path, schema, rows in (
        (folder.contigs, contig_schema(frames), _contig_rows(contigs, frames)),
        (folder.predictions, prediction_schema(frames), of_chunks),
        (folder.regions, REGION_SCHEMA, _region_rows(contigs)),
    ):
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        pq.write_table(table, path.with_suffix(".parquet"))
        path.write_bytes(header_line(schema.names) + table_lines(table, 0.5))
    lines = ["record\tid\tfile\tlength\treason", *map("\t".join, rejected)]
    folder.rejected.write_text("".join(f"{line}\n" for line in lines))
    run = RunReport(
        plan=replace(PLAN, chunk_length=chunk_length, frames=frames),
        out=str(root),
        counts=replace(_counts(contigs, len(rejected)), sample=sample),
        work=counters(20),
        lanes=[report()],
        seconds={"index": 1.0, "embed": 12.0},
        links=links or {},
    )
    return folder, {**run.document, "finished": "2026-01-02T03:04:05+00:00"}


def _counts(contigs: Sequence[MadeContig], rejected: int) -> TableCounts:
    calls = [contig.call for contig in contigs]
    scores = [p for contig in contigs for p in contig.scored]
    return TableCounts(
        records=len(contigs),
        rejected=rejected,
        chunks=sum(len(contig.p_virus) for contig in contigs),
        scored_chunks=len(scores),
        viral_chunks=sum(p >= 0.5 for p in scores),
        frames=len(scores),
        contigs_virus=calls.count("virus"),
        contigs_other=calls.count("other"),
        contigs_unscored=calls.count("unscored"),
    )


def _contig_rows(contigs: Sequence[MadeContig], frames: FrameRule) -> Iterator[tuple[object, ...]]:
    """Of the longest stretches, the score of a contig is the mean of its chunks, too."""
    for number, contig in enumerate(contigs, 1):
        scored, viral = contig.scored, sum(p >= 0.5 for p in contig.scored)
        share, mean_p = (viral / len(scored), sum(scored) / len(scored)) if scored else (None, None)
        tier = contig.tier if scored else None
        counted = (contig.bases, len(contig.p_virus), len(scored), viral)
        row = (contig.name, number, *counted, share, mean_p, contig.call, tier)
        of_contig = (mean_p, CLASS_OF_CALL[contig.call], 0.25 if scored else None)
        yield row if frames == "open" else (*row, *of_contig)


def _chunk_rows(
    contigs: Sequence[MadeContig], frames: FrameRule, chunk_length: ChunkRule
) -> Iterator[tuple[object, ...]]:
    for contig in contigs:
        chunks = chunk_table(np.array([contig.bases]), chunk_length)
        for i, p in enumerate(contig.p_virus):
            where = (contig.name, i + 1, int(chunks.start[i]) + 1, int(chunks.end[i]))
            call = "unscored" if p is None else "virus" if p >= 0.5 else "other"
            status = FRAME_KINDS[frames].missing if p is None else "scored"
            row = (*where, None if p is None else "F1", p, call, status)
            yield row if frames == "open" else (*row, CLASS_OF_CALL[call])


def _region_rows(contigs: Sequence[MadeContig]) -> Iterator[tuple[object, ...]]:
    for contig in contigs:
        for start, end in contig.regions:
            length = end - start + 1
            yield (contig.name, start, end, length, length // CHUNK_LENGTH, 12.5, 0.9, "confident")
