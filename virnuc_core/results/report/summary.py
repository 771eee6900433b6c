"""What a report says of all contigs of a run, and which of them it shows one by one; one pass, in bounded memory."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.results.calls import VIRUS
from virnuc_core.results.report.labels import UNLABELLED
from virnuc_core.results.report.rows import Contig
from virnuc_core.results.report.tracks import BINS

# A region that leaves more than this of its contig out is an island in it, as a prophage is.
WHOLE_SHARE: Final = 0.8
UNSURE: Final = "unsure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over contigs.

    Attributes:
        contigs: how many.
        bases: in all of them.
        calls: contigs by call.
        tiers: contigs called virus by tier.
        histogram: contigs with a score by mean_p, int64 (BINS,).
        mean_p_sum: sum of mean_p over these.
        regions: viral regions.
        region_bases: bases in these.
        island_contigs: contigs with regions that are viral only in part.
        hosts: contigs that are not called virus and hold a region that is more than unsure.
    """

    contigs: int
    bases: int
    calls: Mapping[str, int]
    tiers: Mapping[str, int]
    histogram: npt.NDArray[np.int64]
    mean_p_sum: float
    regions: int
    region_bases: int
    island_contigs: int
    hosts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ContigSummary:
    """All contigs, and some of them.

    Attributes:
        totals: over all contigs.
        classes: over the contigs of each class, by its name; empty without labels.
        shown: the contigs that matter most, at most so many as were asked for, the first one most.
        unknown_labels: labels that are of no contig of the run.
    """

    totals: Totals
    classes: Mapping[str, Totals]
    shown: tuple[Contig, ...]
    unknown_labels: int


def is_island(contig: Contig) -> bool:
    """Whether a contig is viral in a part of it only."""
    return 0 < contig.viral_bases < WHOLE_SHARE * contig.length


def importance(contig: Contig) -> tuple[bool, int, int, int]:
    """What comes first where there is no room for all: viral ones, then by viral chunks, by length, by place."""
    is_viral = contig.call == VIRUS or bool(contig.regions)
    return (is_viral, contig.viral_chunks, contig.length, -contig.place)


def summarise(contigs: Iterable[Contig], labels: Mapping[str, str] | None, max_contigs: int) -> ContigSummary:
    """Adds contigs up.

    Args:
        contigs: all contigs of a run, in any order.
        labels: class of contigs by name; None without labels.
        max_contigs: how many are kept.
    """
    everything = _Sums()
    classes: dict[str, _Sums] = {}
    kept: list[tuple[tuple[bool, int, int, int], Contig]] = []
    num_labelled = 0
    for contig in contigs:
        everything.add(contig)
        if labels is not None:
            label = labels.get(contig.name)
            num_labelled += label is not None
            classes.setdefault(label or UNLABELLED, _Sums()).add(contig)
        entry = (importance(contig), contig)
        # Places differ, so contigs themselves are never compared.
        if len(kept) < max_contigs:
            heapq.heappush(kept, entry)
        elif kept and entry[0] > kept[0][0]:
            heapq.heapreplace(kept, entry)
    ordered = sorted(kept, key=lambda entry: entry[0], reverse=True)
    return ContigSummary(
        totals=everything.totals,
        classes={label: classes[label].totals for label in sorted(classes)},
        shown=tuple(contig for _, contig in ordered),
        unknown_labels=len(labels) - num_labelled if labels else 0,
    )


class _Sums:
    """Totals that grow."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._bins = [0] * BINS
        self._mean_p_sum = 0.0

    def add(self, contig: Contig) -> None:
        self._calls[contig.call] += 1
        if contig.call == VIRUS:
            self._tiers[contig.tier] += 1
        self._numbers["contigs"] += 1
        self._numbers["bases"] += contig.length
        if contig.mean_p is not None:
            self._bins[min(int(contig.mean_p * BINS + 1e-9), BINS - 1)] += 1
            self._mean_p_sum += contig.mean_p
        if contig.regions:
            self._numbers["regions"] += len(contig.regions)
            self._numbers["region_bases"] += contig.viral_bases
            self._numbers["island_contigs"] += is_island(contig)
            is_clear = any(region.tier != UNSURE for region in contig.regions)
            self._numbers["hosts"] += is_clear and contig.call != VIRUS

    @property
    def totals(self) -> Totals:
        numbers = self._numbers
        return Totals(
            contigs=numbers["contigs"],
            bases=numbers["bases"],
            calls=dict(self._calls),
            tiers=dict(self._tiers),
            histogram=np.array(self._bins, np.int64),
            mean_p_sum=self._mean_p_sum,
            regions=numbers["regions"],
            region_bases=numbers["region_bases"],
            island_contigs=numbers["island_contigs"],
            hosts=numbers["hosts"],
        )
