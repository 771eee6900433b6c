"""Hand-written tables and run.json of a finished run: the inputs of a report."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.made_lanes import counters, report
from tests.made_plans import PLAN
from virnuc_core.inference.plan import PlannedHead
from virnuc_core.results.regions import REGION_SCHEMA
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import CONTIG_SCHEMA, PREDICTION_SCHEMA, TableCounts
from virnuc_core.results.writers import header_line, table_lines
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import chunk_table

CHUNK_LENGTH = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeContig:
    """A contig by its chunk scores, None for no score; regions are (start, end).

    The first `dna_alone` scores are of chunks without a stop-free frame.
    """

    name: str
    p_virus: tuple[float | None, ...]
    regions: tuple[tuple[int, int], ...] = ()
    tier: str = "likely"
    length: int | None = None
    dna_alone: int = 0

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


def island(name: str, begin: int = 40, end: int = 60, chunks: int = 120) -> MadeContig:
    """A contig with viral chunks `begin` to `end` - 1; every third chunk has no stop-free frame."""
    inside = [begin <= i < end for i in range(chunks)]
    p_virus = tuple(None if i % 3 == 2 else 0.9 if inside[i] else 0.1 for i in range(chunks))
    region = (begin * CHUNK_LENGTH + 1, end * CHUNK_LENGTH)
    return MadeContig(name=name, p_virus=p_virus, regions=(region,))


def many_contigs(number: int, chunks: int = 5) -> list[MadeContig]:
    """Contigs with random scores; every seventh has no stop-free frame."""
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
) -> tuple[RunFolder, dict[str, Any]]:
    """Writes the tables; returns the folder and the content of its run.json."""
    folder = RunFolder(root)
    rejected = list(rejected)
    rows = [contig_row(number, contig) for number, contig in enumerate(contigs, 1)]
    write(folder.contigs, folder.contigs_parquet, CONTIG_SCHEMA, rows)
    rows = [row for contig in contigs for row in chunk_rows(contig)]
    write(folder.predictions, folder.predictions_parquet, PREDICTION_SCHEMA, rows)
    rows = [row for contig in contigs for row in region_rows(contig)]
    write(folder.regions, folder.regions_parquet, REGION_SCHEMA, rows)
    lines = ["record\tid\tfile\tlength\treason", *map("\t".join, rejected)]
    folder.rejected.write_text("".join(f"{line}\n" for line in lines))
    run = RunReport(
        plan=replace(PLAN, chunk_length=CHUNK_LENGTH, dna_head=_dna_head(contigs)),
        out=str(root),
        counts=counts_of(contigs, len(rejected)),
        work=counters(20),
        lanes=[report()],
        seconds={"index": 1.0, "embed": 12.0},
        links=links or {},
    )
    return folder, {**run.document, "finished": "2026-01-02T03:04:05+00:00"}


def _dna_head(contigs: Sequence[MadeContig]) -> PlannedHead | None:
    is_used = any(contig.dna_alone for contig in contigs)
    return PlannedHead(name="tiny-500-dna", fingerprint="e" * 64, location="/heads/dna") if is_used else None


def counts_of(contigs: Sequence[MadeContig], rejected: int) -> TableCounts:
    calls = [contig.call for contig in contigs]
    scores = [p for contig in contigs for p in contig.scored]
    return TableCounts(
        records=len(contigs),
        rejected=rejected,
        chunks=sum(len(contig.p_virus) for contig in contigs),
        scored_chunks=len(scores),
        dna_alone_chunks=sum(contig.dna_alone for contig in contigs),
        viral_chunks=sum(p >= 0.5 for p in scores),
        frames=len(scores),
        contigs_virus=calls.count("virus"),
        contigs_other=calls.count("other"),
        contigs_unscored=calls.count("unscored"),
    )


def write(table: Path, parquet: Path, schema: pa.Schema, rows: list[tuple[object, ...]]) -> None:
    """Writes a table as TSV and Parquet."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    made = pa.table(dict(zip(schema.names, map(list, columns), strict=True)), schema)
    pq.write_table(made, parquet)
    table.write_bytes(header_line(schema.names) + table_lines(made, 0.5))


def contig_row(number: int, contig: MadeContig) -> tuple[object, ...]:
    scored, viral = contig.scored, sum(p >= 0.5 for p in contig.scored)
    counted = (contig.bases, len(contig.p_virus), len(scored), viral)
    if not scored:
        return (contig.name, number, *counted, None, None, contig.call, None, 0)
    share, mean_p = viral / len(scored), sum(scored) / len(scored)
    return (contig.name, number, *counted, share, mean_p, contig.call, contig.tier, contig.dna_alone)


def chunk_rows(contig: MadeContig) -> Iterator[tuple[object, ...]]:
    chunks = chunk_table(np.array([contig.bases]), CHUNK_LENGTH)
    for i, p in enumerate(contig.p_virus):
        where = (contig.name, i + 1, int(chunks.start[i]) + 1, int(chunks.end[i]))
        if p is None:
            yield (*where, None, None, "unscored", "no_open_frame")
        else:
            yield (*where, "F1", p, "virus" if p >= 0.5 else "other", "scored")


def region_rows(contig: MadeContig) -> Iterator[tuple[object, ...]]:
    for start, end in contig.regions:
        length = end - start + 1
        yield (contig.name, start, end, length, length // CHUNK_LENGTH, 12.5, 0.9, "confident", 0)
