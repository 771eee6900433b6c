"""Sums over the contigs of a run."""

from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.results.calls import VIRUS
from virnuc_core.results.writers import count_values

BINS: Final = 50  # of histograms
# A region covering less of its contig is an island in it, such as a prophage.
ISLAND_SHARE: Final = 0.8
UNSURE: Final = "unsure"

Row = dict[str, Any]


class Totals:
    """Sums over contigs.

    Attributes:
        values: contigs, bases, regions, region_bases (bases in regions), island_contigs (partly viral), hosts (not called virus,
            but with a region of a tier above unsure).
        predicted: contigs and bases by predicted class and whether it is one of viruses.
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self.predicted: dict[tuple[str, bool], Counter[str]] = {}
        self._calls: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._histogram = np.zeros(BINS, np.int64)
        self._p_sum = 0.0

    def add(self, contigs: pa.Table) -> None:
        """Counts the next contigs, rows as `virnuc_core.results.report.reading` reads them."""
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
    def document(self) -> Row:
        """As JSON values; tiers are of contigs called virus, histogram and sum are of p_call."""
        names = ("contigs", "bases", "regions", "region_bases", "island_contigs", "hosts")
        return {
            **{name: self.values[name] for name in names},
            "calls": dict(self._calls),
            "tiers": dict(self._tiers),
            "histogram": self._histogram.tolist(),
            "p_sum": self._p_sum,
        }


def histogram(p_virus: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Counts of the probabilities (n,) in `BINS` equal bins of 0..1, ignoring NaN."""
    bins = np.minimum((p_virus[~np.isnan(p_virus)] * BINS + 1e-9).astype(np.int64), BINS - 1)
    return np.bincount(bins, minlength=BINS).astype(np.int64)
