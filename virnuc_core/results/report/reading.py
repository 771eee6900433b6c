"""Reads the Parquet tables of a run in blocks, with the regions of each contig: sums over all contigs, and the most important ones."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.results.calls import VIRUS
from virnuc_core.results.regions import REGION_SCHEMA
from virnuc_core.results.writers import count_values
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAME_KINDS, FrameRule

BINS: Final = 50  # of histograms
# A region covering less of its contig is an island in it, such as a prophage.
ISLAND_SHARE: Final = 0.8
UNSURE: Final = "unsure"


def iter_batches(
    path: Path, columns: Sequence[str] | None = None, batch_rows: int = 1 << 16
) -> Iterator[pa.RecordBatch]:
    """Reads a table of a run in blocks."""
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_rows, columns=columns)


def iter_contigs(
    folder: RunFolder, frames: FrameRule, batch_rows: int = 1 << 16
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows of contigs.parquet and their rows of regions.parquet, in blocks, both with the `place` of the contig, from 0.

    Contigs also have `p_call`, `num_regions`, `sure_regions` (of a tier above unsure) and `viral_bases`.
    """
    region_batches = iter_batches(folder.regions_parquet, None, batch_rows)
    waiting = pa.RecordBatch.from_pylist([], REGION_SCHEMA)
    first = 0
    for batch in iter_batches(folder.contigs_parquet, None, batch_rows):
        own = []
        while len(waiting) or (waiting := next(region_batches, waiting)):
            # Regions are in the order of their contigs, so those of this block come first.
            rows = pc.index_in(waiting["contig"], batch["contig"]).drop_null().to_numpy()
            own.append(waiting.slice(0, len(rows)).append_column("place", pa.array(first + rows, pa.int64())))
            waiting = waiting.slice(len(rows))
            if len(waiting):
                break
        regions = pa.Table.from_batches(own, REGION_SCHEMA.append(pa.field("place", pa.int64())))
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


class Totals:
    """Sums over contigs.

    Attributes:
        values: region_bases are those in regions, island_contigs those viral in part, hosts those not called virus, but with a
            region of a tier above unsure.
        predicted: contigs and bases by predicted class and whether it is one of viruses.
    """

    def __init__(self) -> None:
        names = ("contigs", "bases", "regions", "region_bases", "island_contigs", "hosts")
        self.values: Counter[str] = Counter(dict.fromkeys(names, 0))
        self.predicted: dict[tuple[str, bool], Counter[str]] = {}
        self._calls: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._histogram = np.zeros(BINS, np.int64)
        self._p_sum = 0.0

    def add(self, contigs: pa.Table) -> None:
        """Counts the next contigs, as `iter_contigs` gives them."""
        length, num_regions, viral_bases, sure_regions = (
            contigs[name].to_numpy() for name in ("length", "num_regions", "viral_bases", "sure_regions")
        )
        is_virus = pc.equal(contigs["call"], VIRUS).to_numpy()
        self._calls.update(count_values(contigs["call"]))
        self._tiers.update(count_values(contigs["tier"].filter(pa.array(is_virus))))
        p_call = contigs["p_call"].drop_null().to_numpy()
        self._histogram += histogram(p_call)
        # One after the other, so that the sum does not depend on how many are added at a time.
        self._p_sum = float(np.add.accumulate(np.append(self._p_sum, p_call))[-1])
        is_island = (num_regions > 0) & (viral_bases < ISLAND_SHARE * length)
        sums = {
            "contigs": len(contigs),
            "bases": length.sum(),
            "regions": num_regions.sum(),
            "region_bases": viral_bases.sum(),
            "island_contigs": is_island.sum(),
            "hosts": (~is_virus & (sure_regions > 0)).sum(),
        }
        self.values.update({name: int(number) for name, number in sums.items()})
        if "class" in contigs.column_names:
            keys = pa.table({"class": contigs["class"], "is_virus": is_virus, "bases": length})
            keys = keys.filter(keys["class"].is_valid())
            grouped = keys.group_by(["class", "is_virus"], use_threads=False)
            for row in grouped.aggregate([([], "count_all"), ("bases", "sum")]).to_pylist():
                own = self.predicted.setdefault((row["class"], row["is_virus"]), Counter())
                own.update(contigs=row["count_all"], bases=row["bases_sum"])

    @property
    def document(self) -> dict[str, Any]:
        """As JSON values; tiers are of contigs called virus, histogram and sum are of p_call."""
        return {
            **self.values,
            "calls": dict(self._calls),
            "tiers": dict(self._tiers),
            "histogram": self._histogram.tolist(),
            "p_sum": self._p_sum,
        }


def histogram(p_virus: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Counts of the probabilities (n,) in `BINS` equal bins of 0..1, ignoring NaN."""
    bins = np.minimum((p_virus[~np.isnan(p_virus)] * BINS + 1e-9).astype(np.int64), BINS - 1)
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def most_important(
    blocks: Iterable[tuple[pa.Table, pa.Table]], limit: int, totals: Totals
) -> tuple[pa.Table, pa.Table]:
    """The contigs to keep if there are too many, and their regions: viral ones first, then by viral chunks, length, and input order.

    A few blocks more than the limit are held at a time. All contigs are added to the totals.
    """
    contigs: list[pa.Table] = []
    regions: list[pa.Table] = []
    for own_contigs, own_regions in blocks:
        totals.add(own_contigs)
        contigs.append(own_contigs)
        regions.append(own_regions)
        if sum(map(len, contigs)) >= 2 * limit:
            contigs, regions = ([kept] for kept in _kept(contigs, regions, limit))
    return _kept(contigs, regions, limit)


def _kept(contigs: list[pa.Table], regions: list[pa.Table], limit: int) -> tuple[pa.Table, pa.Table]:
    rows = pa.concat_tables(contigs)
    is_viral = pc.equal(rows["call"], VIRUS).to_numpy() | (rows["num_regions"].to_numpy() > 0)
    keys = (rows["place"], pc.negate(rows["length"]), pc.negate(rows["viral_chunks"]), ~is_viral)
    rows = rows.take(pa.array(np.lexsort([np.asarray(key) for key in keys])[:limit]))
    own = pa.concat_tables(regions)
    return rows, own.filter(pc.is_in(own["place"], rows["place"].combine_chunks()))
