"""The tables and the run.json of a finished run, written by hand: what a report is made from."""

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
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.sample import SampleCalls
from virnuc_core.results.tables import CHUNK_SCHEMA, CONTIG_SCHEMA, TableCounts
from virnuc_core.results.virus_files import SUMMARY_SCHEMA
from virnuc_core.results.writers import header_line, table_lines
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import chunk_table
from virnuc_core.specs import FrameRule

CHUNK_LENGTH = 500
SAMPLE = SampleCalls(share=0.125, threshold=0.93, expected_false=1.5, expected_fdr=0.25)
CLASS_OF_CALL = {
    "virus": "prokaryotic virus",
    "provirus": "bacterium",
    "nonviral": "bacterium",
    "unscored": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeContig:
    """A contig by the scores of its chunks, None for one without a score; proviruses are (start, end)."""

    name: str
    scores: tuple[float | None, ...]
    proviruses: tuple[tuple[int, int], ...] = ()
    confidence: str = "likely"
    length: int | None = None

    @property
    def bases(self) -> int:
        return CHUNK_LENGTH * len(self.scores) if self.length is None else self.length

    @property
    def scored(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    @property
    def score(self) -> float | None:
        return round(sum(self.scored) / len(self.scored), 6) if self.scored else None

    @property
    def call(self) -> str:
        if self.score is None or self.proviruses:
            return "provirus" if self.proviruses else "unscored"
        return "virus" if self.score >= 0.5 else "nonviral"


def lysogen(name: str, begin: int = 40, end: int = 60, chunks: int = 120) -> MadeContig:
    """A contig whose chunks begin to end - 1 are a provirus; each third chunk has no score."""
    scores = tuple(None if i % 3 == 2 else 0.9 if begin <= i < end else 0.1 for i in range(chunks))
    return MadeContig(name=name, scores=scores, proviruses=((begin * CHUNK_LENGTH + 1, end * CHUNK_LENGTH),))


def many_contigs(number: int, chunks: int = 5) -> list[MadeContig]:
    """Contigs of random scores; each seventh has none."""
    generator = random.Random(1)
    return [
        MadeContig(
            name=f"contig_{i}",
            scores=tuple(generator.random() if i % 7 else None for _ in range(chunks)),
            confidence=generator.choice(["confident", "likely", "unsure"]),
            length=CHUNK_LENGTH * chunks - i % CHUNK_LENGTH,
        )
        for i in range(number)
    ]


def sequence_of(row: int) -> bytes:
    """Bases of a contig, with 25, 50 or 75% G and C; every tenth contig is a gap."""
    return (b"AGTT", b"ACGT", b"AGCC")[row % 3] + b"N" * (row % 7) if row % 10 else b"NNNN"


def write_run(
    root: Path,
    contigs: Sequence[MadeContig],
    *,
    rejected: Iterable[tuple[str, ...]] = (),
    links: dict[str, str] | None = None,
    frames: FrameRule = "longest",
) -> tuple[RunFolder, dict[str, Any]]:
    """Writes the tables; gives the folder and the content of its run.json.

    Only the longest frames have heads that tell classes, novelty and the share of viruses.
    """
    folder = RunFolder(root)
    rejected = list(rejected)
    for path, schema, rows in (
        (folder.contigs, CONTIG_SCHEMA, [_contig_row(contig, frames) for contig in contigs]),
        (folder.chunks, CHUNK_SCHEMA, _chunk_rows(contigs)),
        (folder.summary, SUMMARY_SCHEMA, _summary_rows(contigs)),
    ):
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=1000)
        path.write_bytes(header_line(schema.names) + table_lines(table))
    lines = ["record\tid\tfile\tlength\treason", *map("\t".join, rejected)]
    folder.rejected.write_text("".join(f"{line}\n" for line in lines))
    run = RunReport(
        plan=replace(PLAN, chunk_length=CHUNK_LENGTH, frames=frames),
        out=str(root),
        counts=_counts(contigs, len(rejected), SAMPLE if frames == "longest" else None),
        work=counters(20),
        lanes=[report()],
        seconds={"index": 1.0, "embed": 12.0},
        links=links or {},
    )
    return folder, {**run.document, "finished": "2026-01-02T03:04:05+00:00"}


def _counts(contigs: Sequence[MadeContig], rejected: int, sample: SampleCalls | None) -> TableCounts:
    calls = [contig.call for contig in contigs]
    scored = sum(len(contig.scored) for contig in contigs)
    return TableCounts(
        records=len(contigs),
        rejected=rejected,
        chunks=sum(len(contig.scores) for contig in contigs),
        scored_chunks=scored,
        frames=scored,
        short_contigs=0,
        contigs_virus=calls.count("virus"),
        contigs_provirus=calls.count("provirus"),
        contigs_nonviral=calls.count("nonviral"),
        contigs_unscored=calls.count("unscored"),
        proviruses=sum(len(contig.proviruses) for contig in contigs),
        sample=sample,
    )


def _contig_row(contig: MadeContig, frames: FrameRule) -> tuple[object, ...]:
    is_scored, has_class = contig.score is not None, frames == "longest"
    confidence = contig.confidence if is_scored else None
    known = (CLASS_OF_CALL[contig.call], 0.25 if is_scored else None) if has_class else (None, None)
    counted = (contig.bases, len(contig.scores), len(contig.scored))
    return (contig.name, *counted, contig.score, contig.call, confidence, *known)


def _chunk_rows(contigs: Sequence[MadeContig]) -> Iterator[tuple[object, ...]]:
    for contig in contigs:
        chunks = chunk_table(np.array([contig.bases]), CHUNK_LENGTH)
        for i, score in enumerate(contig.scores):
            where = (contig.name, i + 1, int(chunks.start[i]) + 1, int(chunks.end[i]))
            found = (None, None, "no_open_frame") if score is None else ("F1", score, "scored")
            yield (*where, *found)


def _summary_rows(contigs: Sequence[MadeContig]) -> Iterator[tuple[object, ...]]:
    for contig in contigs:
        kind = (CLASS_OF_CALL["virus"], contig.confidence)
        if contig.call == "virus":
            yield (contig.name, contig.bases, "linear", None, contig.score, 0.05, *kind)
        for start, end in contig.proviruses:
            name = f"{contig.name}|provirus_{start}_{end}"
            yield (name, end - start + 1, "provirus", f"{start}-{end}", 0.97, 0.02, *kind)
