"""Viral regions of contigs, found from the p_virus of their chunks, and written as tables, BED, GFF3 and FASTA.

The log-odds of a contig's chunks are approximated by a level that changes at few places: the path over LEVELS with the smallest
sum of squared differences, plus a cost for each change (dynamic programming). Regions are where the level is above zero.

There are several levels because viruses differ in how well they score: the border of a moderately scoring virus is where its
level ends, not where single chunks fall below one half. For the same reason the cost of a change grows with the variance within
the contig, but in a short contig not beyond what a region could explain. It is never so small that one chunk alone makes a region
among chunks that are not viral. A chunk without a score is uninformative: the border lies midway where its neighbours disagree,
and there is no region where no scored chunk is near.

The parameters are constants, so a contig's regions depend on its own scores alone. docs/regions.md gives their origin and
compares the method with others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, starmap
from operator import attrgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from virnuc_core.columns import Float64, Int64
from virnuc_core.results.calls import DEFAULT_THRESHOLD
from virnuc_core.results.writers import decimals, fasta_record, six_decimals, table_lines
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import Tier

LEVELS: Final = np.arange(-3.75, 4.0, 0.5)  # log-odds of virus; the lower half is not viral

REGION_SCHEMA: Final = pa.schema(
    [
        ("contig", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("length", pa.int64()),
        ("chunks", pa.int64()),
        ("score", pa.float64()),
        ("mean_p", pa.float64()),
        ("tier", pa.string()),
    ]
)


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
class ChunkScores:
    """All C chunks of some contigs, sorted by contig number and position, arrays (C,).

    `start` is 0-based, `end` exclusive; `p_virus` is NaN where the chunk is not scored.
    """

    contig: Int64
    start: Int64
    end: Int64
    p_virus: Float64


@dataclass(frozen=True, slots=True)
class Region:
    """A viral region of the contig of that number; `start` is 0-based, `end` exclusive.

    Attributes:
        chunks: all of its chunks, scored or not.
        score: likelihood ratio of viral to other levels, multiplied over its chunks, in decibans (10 log10); relative to 0.5,
            whatever the threshold.
        mean_p: mean p_virus of its scored chunks.
    """

    contig: int
    start: int
    end: int
    chunks: int
    score: float
    mean_p: float

    @property
    def tier(self) -> Tier:
        """Confidence, from the score, to which one chunk contributes at most 16 decibans."""
        return "confident" if self.score >= 60 else "likely" if self.score >= 20 else "unsure"


def find_regions(chunks: ChunkScores, threshold: float = DEFAULT_THRESHOLD) -> list[Region]:
    """Viral regions, by contig and position, which neither touch nor overlap; `chunks` must hold all chunks of its contigs."""
    is_scored = ~np.isnan(chunks.p_virus)
    scored = np.flatnonzero(is_scored)
    if not len(scored):
        return []
    values = log_odds(chunks.p_virus, threshold)
    levels = best_levels(values[scored], chunks.contig[scored], DEFAULT_MODEL)
    nearest, distance = _nearest_scored(chunks, scored)
    is_viral = (levels >= len(LEVELS) // 2)[nearest] & (distance <= DEFAULT_MODEL.max_gap)
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    begins = np.flatnonzero(is_viral & (is_first | ~np.roll(is_viral, 1)))
    ends = np.flatnonzero(is_viral & (np.roll(is_first, -1) | ~np.roll(is_viral, -1))) + 1
    has_score = _sums(is_scored, begins, ends) > 0
    begins, ends = begins[has_score], ends[has_score]
    columns = (
        chunks.contig[begins],
        chunks.start[begins],
        chunks.end[ends - 1],
        ends - begins,
        _sums(_decibans(chunks.p_virus), begins, ends),
        _sums(np.nan_to_num(chunks.p_virus), begins, ends) / _sums(is_scored, begins, ends),
    )
    return list(starmap(Region, zip(*(column.tolist() for column in columns), strict=True)))


def log_odds(p_virus: Float64, threshold: float = DEFAULT_THRESHOLD) -> Float64:
    """float64 (C,): log-odds in nats relative to those of the threshold, within ±4; NaN stays.

    Never zero: a chunk at the threshold is called virus, so it is evidence for a virus here, too.
    """
    zero = np.log(threshold / (1 - threshold))
    least, rest = (1 / (1 + np.exp(4.0 + shift)) for shift in (-zero, zero))
    p = np.clip(p_virus, least, 1 - rest)
    distance = np.abs(np.log(p / (1 - p)) - zero)
    return np.asarray(np.copysign(np.maximum(distance, 1e-9), np.where(p_virus >= threshold, 1.0, -1.0)))


def _decibans(p_virus: Float64) -> Float64:
    """float64 (C,): likelihood ratio of viral to other levels, in decibans; 0 for NaN.

    The log-odds of a chunk are taken for normally distributed around its level, with a standard deviation of 1.2 nats, and any
    chunk for an outlier with likelihood 0.01, relative to 1 at the peak: scores are not calibrated, and neighbours err together.
    """
    distance = (log_odds(p_virus)[:, None] - LEVELS) / 1.2
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


def _nearest_scored(chunks: ChunkScores, scored: Int64) -> tuple[Int64, Float64]:
    """The number of the scored chunk of the same contig whose start is nearest, int64 (C,), and how far it is, in bp.

    Without one in the contig, it is farther away than any contig is long.
    """
    # All contigs on one axis, spaced so that none is near another.
    position = chunks.start + chunks.contig * (2.0 * chunks.end.max() + 1)
    places = position[scored]
    after = np.searchsorted(places, position).clip(max=len(scored) - 1)
    before = (after - 1).clip(min=0)
    to_before, to_after = (np.abs(position - places[index]) for index in (before, after))
    return np.where(to_before < to_after, before, after), np.minimum(to_before, to_after)


def _sums(values: npt.NDArray[Any], begins: Int64, ends: Int64) -> Float64:
    """float64 (n,): sums of values[begins[i] : ends[i]], for non-empty ranges."""
    bounds = np.stack((begins, ends), axis=1).ravel()
    return np.asarray(np.add.reduceat(np.append(values, 0.0), bounds)[::2])


def region_files(
    folder: RunFolder,
    regions: Sequence[Region],
    names: Sequence[str],
    lengths: Sequence[int],
    sequence_of: Callable[[int], bytes],
    threshold: float,
) -> dict[Path, Iterable[bytes | pa.Table]]:
    """What each of the files of regions gets from those of some contigs.

    Names, lengths in bp, and bases are looked up by contig number. In tables, start and end are 1-based and inclusive. Names are
    already safe in tables (`virnuc_core.plain_text`); characters with a meaning in another format are escaped as that format says,
    or else as `%XX`.
    """
    rows = [
        (names[r.contig], r.start + 1, r.end, r.end - r.start, r.chunks, r.score, r.mean_p, r.tier)
        for r in regions
    ]
    table = pa.Table.from_pylist(
        [dict(zip(REGION_SCHEMA.names, row, strict=True)) for row in rows], REGION_SCHEMA
    )
    scores = decimals(table["score"].to_numpy(), 2)
    means = six_decimals(table["mean_p"].to_numpy(), threshold)
    texts = table.set_column(REGION_SCHEMA.get_field_index("score"), "score", scores)
    bed, gff3 = [], []
    numbered = zip(regions, scores.to_pylist(), means.to_pylist(), strict=True)
    for contig, own in groupby(numbered, key=lambda one: one[0].contig):
        gff3_name = _gff3_name(names[contig])
        gff3.append(f"##sequence-region {gff3_name} 1 {lengths[contig]}\n")
        for number, (region, score, mean_p) in enumerate(own, 1):
            bed.append(_bed_line(names[contig], number, region))
            columns = f"virnuc\tviral_sequence\t{region.start + 1}\t{region.end}\t{score}\t.\t.\t"
            attributes = (
                f"ID={gff3_name}.region_{number};chunks={region.chunks};mean_p={mean_p};tier={region.tier}"
            )
            gff3.append(f"{gff3_name}\t{columns}{attributes}\n")

    def records() -> Iterator[bytes]:
        for contig, own in groupby(regions, key=attrgetter("contig")):
            sequence = sequence_of(contig)
            for region in own:
                name = f"{names[contig]}_{region.start + 1}_{region.end}"
                yield fasta_record(name, sequence[region.start : region.end])

    return {
        folder.regions: [table_lines(texts, threshold)],
        folder.regions_bed: ["".join(bed).encode()],
        folder.regions_gff3: ["".join(gff3).encode()],
        folder.regions_fasta: records(),
        folder.regions_parquet: [table],
    }


def _bed_line(contig: str, number: int, region: Region) -> str:
    """A line of BED6: 0-based, half-open; the score is ten times that of the region, clipped to 0..1000."""
    # BED readers take lines with these prefixes for headers.
    if contig.startswith(("#", "track", "browser")):
        contig = f"%{ord(contig[0]):02X}{contig[1:]}"
    score = min(max(round(10 * region.score), 0), 1000)
    return f"{contig}\t{region.start}\t{region.end}\tregion_{number}_{region.tier}\t{score}\t.\n"


def _gff3_name(name: str) -> str:
    """Percent-encodes, in UTF-8, what the first column does not allow. Source: the specification of GFF3 1.26."""
    return quote(name, safe=".:^*$@!+_?-|").replace("~", "%7E")
