"""Sums over the contigs of a run, or of a class of them."""

from collections import Counter
from typing import Any, Final

from virnuc_core.results.calls import VIRUS

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
        labelled: contigs with a label.
        predicted: contigs and bases by predicted class and whether it is one of viruses.
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self.labelled = 0
        self.predicted: dict[tuple[str, bool], Counter[str]] = {}
        self._calls: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._histogram = [0] * BINS
        self._p_sum = 0.0

    def add(self, contig: Row) -> None:
        """Counts a contig."""
        is_virus, p_call, regions = contig["call"] == VIRUS, contig["p_call"], contig["regions"]
        self._calls[contig["call"]] += 1
        if is_virus:
            self._tiers[contig["tier"]] += 1
        if p_call is not None:
            self._histogram[min(int(p_call * BINS + 1e-9), BINS - 1)] += 1
            self._p_sum += p_call
        self.values["contigs"] += 1
        self.values["bases"] += contig["length"]
        if contig.get("class") is not None:
            own = self.predicted.setdefault((contig["class"], is_virus), Counter())
            own.update(contigs=1, bases=contig["length"])
        if regions:
            self.values["regions"] += len(regions)
            self.values["region_bases"] += contig["viral_bases"]
            self.values["island_contigs"] += contig["viral_bases"] < ISLAND_SHARE * contig["length"]
            self.values["hosts"] += not is_virus and any(region["tier"] != UNSURE for region in regions)

    @property
    def document(self) -> Row:
        """As JSON values; tiers are of contigs called virus, histogram and sum are of p_call."""
        names = ("contigs", "bases", "regions", "region_bases", "island_contigs", "hosts")
        return {
            **{name: self.values[name] for name in names},
            "calls": dict(self._calls),
            "tiers": dict(self._tiers),
            "histogram": self._histogram,
            "p_sum": self._p_sum,
        }
