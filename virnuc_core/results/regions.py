"""Viral regions of contigs, found from the scores of their chunks.

The log-odds of a contig's chunks are approximated by a level that changes at few places: the path over LEVELS with the smallest
sum of squared differences, plus a cost for each change (dynamic programming). Regions are where the level is above zero.

There are several levels because viruses differ in how well they score: the border of a moderately scoring virus is where its
level ends, not where single chunks fall below one half. For the same reason the cost of a change grows with the variance within
the contig, but in a short contig not beyond what a region could explain. It is never so small that one chunk alone makes a region
among chunks that are not viral. A chunk without a score is uninformative: the border lies midway where its neighbours disagree,
and there is no region where no scored chunk is near.

The parameters are constants, so a contig's regions depend on its own scores alone. docs/science.md gives their origin and
compares the method with others.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import Float64, Int64

LEVELS: Final = np.arange(-3.75, 4.0, 0.5)  # log-odds of virus; the lower half is not viral


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionModel:
    """Parameters of the method.

    Attributes:
        change_cost: of a change of level, in units of the variance of the contig's log-odds.
        most_change_cost: the same at most, as a share of the cost of the contig's mean; less than one half, since a region
            within a contig takes two changes.
        least_change_cost: the same at least, in nats squared.
        max_gap: bp; a chunk without a score is in a region only if a scored chunk begins within this distance.
    """

    change_cost: float = 16.0
    most_change_cost: float = 0.2
    least_change_cost: float = 31.0  # more than half of what one chunk can cost
    max_gap: float = 2_500.0


DEFAULT_MODEL: Final = RegionModel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """Viral regions, arrays (n,), by contig and position; they neither touch nor overlap.

    Attributes:
        first: number of the first chunk.
        last: number of the last chunk.
        decibans: likelihood ratio of viral to other levels, multiplied over its chunks: 10 log10. A chunk adds at most 16.
    """

    first: Int64
    last: Int64
    decibans: Float64


def find_regions(contig: Int64, start: Int64, end: Int64, scores: Float64) -> Regions:
    """Viral regions of whole contigs from their C chunks, sorted by contig and position.

    Args:
        contig: (C,) number of the contig of each chunk.
        start: (C,) 0-based.
        end: (C,) exclusive.
        scores: (C,) P(virus), NaN without one.
    """
    is_scored = ~np.isnan(scores)
    scored = np.flatnonzero(is_scored)
    if not len(scored):
        return Regions(first=scored, last=scored, decibans=np.empty(0))
    levels = best_levels(log_odds(scores)[scored], contig[scored], DEFAULT_MODEL)
    nearest, distance = _nearest_scored(contig, start, end, scored)
    is_viral = (levels >= len(LEVELS) // 2)[nearest] & (distance <= DEFAULT_MODEL.max_gap)
    is_first = np.diff(contig, prepend=-1) != 0
    first = np.flatnonzero(is_viral & (is_first | ~np.roll(is_viral, 1)))
    last = np.flatnonzero(is_viral & (np.roll(is_first, -1) | ~np.roll(is_viral, -1)))
    has_score = _sums(is_scored, first, last + 1) > 0
    first, last = first[has_score], last[has_score]
    return Regions(first=first, last=last, decibans=_sums(_decibans(scores), first, last + 1))


def log_odds(scores: Float64) -> Float64:
    """float64 (C,): log-odds in nats, within ±4; NaN stays.

    Never zero: a chunk with a score of one half is evidence for a virus.
    """
    least = 1 / (1 + np.exp(4.0))
    p = np.clip(scores, least, 1 - least)
    distance = np.abs(np.log(p / (1 - p)))
    return np.asarray(np.copysign(np.maximum(distance, 1e-9), np.where(scores >= 0.5, 1.0, -1.0)))


def _decibans(scores: Float64) -> Float64:
    """float64 (C,): likelihood ratio of viral to other levels, in decibans; 0 for NaN.

    The log-odds of a chunk are taken for normally distributed around its level, with a standard deviation of 1.2 nats, and any
    chunk for an outlier with likelihood 0.01, relative to 1 at the peak: scores are not calibrated, and neighbours err together.
    """
    distance = (log_odds(scores)[:, None] - LEVELS) / 1.2
    likelihood = np.where(np.isnan(distance), 1.0, np.exp(-(distance**2) / 2) + 0.01)
    other, viral = np.split(likelihood, 2, axis=1)
    return np.asarray(10 * np.log10(viral.sum(axis=1) / other.sum(axis=1)))


def best_levels(values: Float64, contig: Int64, model: RegionModel) -> Int64:
    """int64 (S,): index of the level of each scored chunk, on the path of the smallest total cost through its contig.

    Contigs are independent, so they advance side by side, the longest first, one chunk per step.
    """
    counts = np.diff(np.flatnonzero(np.append(np.diff(contig, prepend=-1) != 0, True)))
    order = np.argsort(-counts, kind="stable")
    starts, counts = (np.cumsum(counts) - counts)[order], counts[order]
    means, squares = (_sums(column, starts, starts + counts) / counts for column in (values, values**2))
    in_variances = np.minimum(model.change_cost, model.most_change_cost * counts)
    change = np.maximum(model.least_change_cost, in_variances * (squares - means**2))
    cost = (values[:, None] - LEVELS) ** 2
    num_longer = np.searchsorted(-counts, -np.arange(counts[0])).tolist()
    total = np.zeros((len(counts), len(LEVELS)))
    came_from = np.empty(cost.shape, np.int8)
    for step, number in enumerate(num_longer):
        stayed, rows = total[:number], starts[:number] + step
        best = stayed.argmin(axis=1)[:, None]
        changed = np.take_along_axis(stayed, best, axis=1) + change[:number, None]
        came_from[rows] = np.where(changed < stayed, best, np.arange(len(LEVELS)))
        total[:number] = np.minimum(changed, stayed) + cost[rows]
    levels, level = np.empty(len(values), np.int64), total.argmin(axis=1)
    for step, number in reversed(list(enumerate(num_longer))):
        rows = starts[:number] + step
        levels[rows] = level[:number]
        level[:number] = came_from[rows, level[:number]]
    return levels


def _nearest_scored(contig: Int64, start: Int64, end: Int64, scored: Int64) -> tuple[Int64, Float64]:
    """The number of the scored chunk of the same contig whose start is nearest, int64 (C,), and how far it is, in bp.

    Without one in the contig, it is farther away than any contig is long.
    """
    # All contigs on one axis, spaced so that none is near another.
    position = start + contig * (2.0 * end.max() + 1)
    places = position[scored]
    after = np.searchsorted(places, position).clip(max=len(scored) - 1)
    before = (after - 1).clip(min=0)
    to_before, to_after = (np.abs(position - places[index]) for index in (before, after))
    return np.where(to_before < to_after, before, after), np.minimum(to_before, to_after)


def _sums(values: npt.NDArray[Any], begins: Int64, ends: Int64) -> Float64:
    """float64 (n,): sums of values[begins[i] : ends[i]], for non-empty ranges."""
    bounds = np.stack((begins, ends), axis=1).ravel()
    return np.asarray(np.add.reduceat(np.append(values, 0.0), bounds)[::2])
