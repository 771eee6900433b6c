"""Reads the Parquet tables of a run in blocks, with the regions of each contig, and keeps the most important contigs."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.errors import DamagedFileError
from virnuc_core.results.calls import VIRUS
from virnuc_core.results.regions import REGION_SCHEMA
from virnuc_core.results.report.totals import UNSURE, Row
from virnuc_core.results.tables import CALL_COLUMN, CONTIG_SCHEMAS
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FrameRule

_BATCH_ROWS: Final = 1 << 16
# Of numbers that are no probabilities.
_BOUNDS: Final = {"score": (-np.inf, np.inf), "evidence": (-np.inf, np.inf), "novelty": (0, 2)}

_PLACED_REGIONS: Final = REGION_SCHEMA.append(pa.field("place", pa.int64()))


def damaged(path: Path, why: object) -> DamagedFileError:
    """The error for a table that is not as virnuc writes it."""
    return DamagedFileError(f"{path} cannot be read as a table of a run ({why}): run the same command again.")


def iter_batches(
    path: Path, schema: pa.Schema, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Reads a table of a run; refuses numbers that are not finite and probabilities outside 0..1."""
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow != schema:
                raise ValueError(f"its columns are {', '.join(file.schema_arrow.names)[:80]}")
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                for field in batch.schema:
                    if pa.types.is_floating(field.type):
                        numbers = batch[field.name].drop_null().to_numpy()
                        low, high = _BOUNDS.get(field.name, (0, 1))
                        if not (np.isfinite(numbers) & (numbers >= low) & (numbers <= high)).all():
                            raise ValueError(f"{field.name} is out of range")
                yield batch
    except (
        pa.ArrowException,
        OSError,
        ValueError,
    ) as error:  # pyarrow raises OSError for what it cannot parse, too
        raise damaged(path, error) from error


def iter_contigs(folder: RunFolder, frames: FrameRule) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows of contigs.parquet and their rows of regions.parquet, in blocks, both with the `place` of the contig, from 0.

    Contigs also have `p_call`, `num_regions`, `sure_regions` (of a tier above unsure) and `viral_bases`.
    """
    region_batches = iter_batches(folder.regions_parquet, REGION_SCHEMA)
    waiting = pa.RecordBatch.from_pylist([], REGION_SCHEMA)
    first = 0
    for batch in iter_batches(folder.contigs_parquet, CONTIG_SCHEMAS[frames]):
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
            "p_call": batch[CALL_COLUMN[frames]],
            "num_regions": np.bincount(rows, minlength=len(batch)),
            "sure_regions": np.bincount(rows[is_sure], minlength=len(batch)),
            "viral_bases": np.bincount(rows, lengths, len(batch)).astype(np.int64),
        }
        contigs = pa.Table.from_batches([batch])
        for name, values in added.items():
            contigs = contigs.append_column(name, pa.array(values))
        yield contigs, regions
        first += len(batch)
    for left in chain([waiting], region_batches):
        if len(left):
            name = left["contig"][0].as_py()
            raise damaged(folder.regions_parquet, f"{name!r} is no contig of the run, or not in its order")


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
