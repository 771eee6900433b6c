"""Reads the Parquet tables of a run in blocks, with the regions of each contig, and keeps the most important contigs."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.results.calls import VIRUS
from virnuc_core.results.regions import REGION_SCHEMA
from virnuc_core.results.report.totals import UNSURE, Row
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAME_KINDS, FrameRule

_BATCH_ROWS: Final = 1 << 16
_PLACED_REGIONS: Final = REGION_SCHEMA.append(pa.field("place", pa.int64()))


def iter_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Reads a table of a run in blocks."""
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(_BATCH_ROWS, columns=columns)


def iter_contigs(folder: RunFolder, frames: FrameRule) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows of contigs.parquet and their rows of regions.parquet, in blocks, both with the `place` of the contig, from 0.

    Contigs also have `p_call`, `num_regions`, `sure_regions` (of a tier above unsure) and `viral_bases`.
    """
    region_batches = iter_batches(folder.regions_parquet)
    waiting = pa.RecordBatch.from_pylist([], REGION_SCHEMA)
    first = 0
    for batch in iter_batches(folder.contigs_parquet):
        own, row = [], 0
        while len(waiting) or (waiting := next(region_batches, waiting)):
            rows = pc.index_in(waiting["contig"], batch["contig"]).fill_null(-1).to_numpy().astype(np.int64)
            follows = np.diff(rows, prepend=row) >= 0
            count = len(rows) if follows.all() else int(follows.argmin())
            own.append(waiting.slice(0, count).append_column("place", pa.array(first + rows[:count])))
            waiting = waiting.slice(count)
            if len(waiting):
                break
            row = int(rows[-1])
        regions = pa.Table.from_batches(own, _PLACED_REGIONS)
        rows, lengths = regions["place"].to_numpy() - first, regions["length"].to_numpy()
        is_sure = pc.not_equal(regions["tier"], UNSURE).to_numpy()
        added = {
            "place": np.arange(first, first + len(batch)),
            "p_call": batch[FRAME_KINDS[frames].call_column],
            "num_regions": np.bincount(rows, minlength=len(batch)),
            "sure_regions": np.bincount(rows[is_sure], minlength=len(batch)),
            "viral_bases": np.bincount(rows, lengths, len(batch)).astype(np.int64),
        }
        contigs = pa.Table.from_batches([batch])
        for name, values in added.items():
            contigs = contigs.append_column(name, pa.array(values))
        yield contigs, regions
        first += len(batch)


def most_important(blocks: Iterable[tuple[pa.Table, pa.Table]], limit: int) -> list[Row]:
    """The contigs to keep if there are too many: viral ones first, then by viral chunks, length, and input order.

    Each has its `regions`; a few blocks more than the limit are held at a time.
    """
    contigs: list[pa.Table] = []
    regions: list[pa.Table] = []
    for own_contigs, own_regions in blocks:
        contigs.append(own_contigs)
        regions.append(own_regions)
        if sum(map(len, contigs)) >= 2 * limit:
            contigs, regions = _kept(contigs, regions, limit)
    contigs, regions = _kept(contigs, regions, limit)
    regions_of = {place: list(own) for place, own in groupby(_rows(regions), key=itemgetter("place"))}
    shown = list(_rows(contigs))
    for contig in shown:
        contig["regions"] = regions_of.get(contig["place"], [])
    return shown


def _kept(
    contigs: Sequence[pa.Table], regions: Sequence[pa.Table], limit: int
) -> tuple[list[pa.Table], list[pa.Table]]:
    if not contigs:
        return [], []
    rows = pa.concat_tables(contigs)
    is_viral = pc.equal(rows["call"], VIRUS).to_numpy() | (rows["num_regions"].to_numpy() > 0)
    keys = (rows["place"], pc.negate(rows["length"]), pc.negate(rows["viral_chunks"]), ~is_viral)
    rows = rows.take(pa.array(np.lexsort([np.asarray(key) for key in keys])[:limit]))
    own = pa.concat_tables(regions)
    return [rows], [own.filter(pc.is_in(own["place"], rows["place"].combine_chunks()))]


def _rows(tables: Iterable[pa.Table]) -> Iterator[Row]:
    return (row for table in tables for row in table.to_pylist())
