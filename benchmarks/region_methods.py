"""Alternatives to `virnuc_core.results.regions` for finding viral regions from chunk scores."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.results.regions import (
    ChunkScores,
    Region,
    RegionModel,
    find_regions,
    log_odds,
    regions_of,
)

Float64 = npt.NDArray[np.float64]
Method = Callable[[ChunkScores], list[Region]]

DISTANCES: Final = (5_000.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0, 60_000.0)
DOUBTS: Final = (0.02, 0.05, 0.1, 0.2, 0.3)
NEUTRAL_PS: Final = (0.3, 0.35, 0.4, 0.45, 0.5)
PENALTIES: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoStates:
    """A two-state hidden Markov model.

    Attributes:
        border_every: mean distance in bp between borders.
        doubt: probability that a chunk reports the wrong state.
        neutral_p: the p_virus that favours neither state.
    """

    border_every: float
    doubt: float
    neutral_p: float


def methods() -> dict[str, dict[str, Method]]:
    """Every method with every tested setting, by name and setting."""
    levels = [
        RegionModel(change_every=distance, emission_sd=sd, outlier_weight=weight, max_gap=gap)
        for distance in DISTANCES
        for sd in (0.8, 1.0, 1.2, 1.4, 1.6)
        for weight in (0.003, 0.01, 0.03)
        for gap in (1_500.0, 2_500.0, 5_000.0, 1e6)
    ]
    two_states = [
        TwoStates(border_every=distance, doubt=doubt, neutral_p=neutral)
        for distance in DISTANCES
        for doubt in DOUBTS
        for neutral in NEUTRAL_PS
    ]
    pairs = [(penalty, neutral) for penalty in PENALTIES for neutral in NEUTRAL_PS]
    return {
        "levels, posterior": {_words(model): partial(find_regions, model=model) for model in levels},
        "two states, posterior": {
            _words(model): partial(likelier_states, model=model) for model in two_states
        },
        "two states, likeliest path": {
            _words(model): partial(likeliest_path, model=model) for model in two_states
        },
        "change points": {
            f"penalty={penalty} neutral_p={neutral}": partial(
                change_points, penalty=penalty, neutral_p=neutral
            )
            for penalty, neutral in pairs
        },
        "chunks alone": {f"neutral_p={neutral}": partial(alone, neutral_p=neutral) for neutral in NEUTRAL_PS},
    }


def _words(model: RegionModel | TwoStates) -> str:
    return " ".join(f"{name}={value:g}" for name, value in asdict(model).items())


def alone(chunks: ChunkScores, neutral_p: float) -> list[Region]:
    """Each chunk by its own score."""
    scores = np.nan_to_num(chunks.p_virus)
    return regions_of(chunks, scores >= neutral_p, scores)


def likelier_states(chunks: ChunkScores, model: TwoStates) -> list[Region]:
    """The more likely state of each chunk (forward-backward algorithm)."""
    ratio, border = _ratio(chunks, model), _border(chunks, model.border_every)
    before = _expected(ratio, border)
    after = _expected(ratio[::-1], np.roll(border, -1)[::-1])[::-1]
    return regions_of(chunks, ratio * before * after > 1, np.log10(ratio))


def _ratio(chunks: ChunkScores, model: TwoStates) -> Float64:
    """float64 (C,): likelihood ratio of virus, bounded by doubt; 1 for NaN."""
    neutral, doubt = model.neutral_p, model.doubt
    p = np.where(np.isnan(chunks.p_virus), neutral, chunks.p_virus)
    virus, other = p * (1 - neutral), (1 - p) * neutral
    return np.asarray(((1 - doubt) * virus + doubt * other) / (doubt * virus + (1 - doubt) * other))


def _border(chunks: ChunkScores, border_every: float) -> Float64:
    """float64 (C,): probability of a change of state since the previous chunk; 1/2 for the first of a contig."""
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    distance = np.where(is_first, np.inf, np.diff(chunks.start, prepend=0))
    return np.asarray(-np.expm1(-2 * distance / border_every) / 2)


def _expected(ratio: Float64, border: Float64) -> Float64:
    """float64 (C,): odds of virus for each chunk, from the preceding chunks only."""
    odds, known = [], 1.0
    for own, other in zip(ratio.tolist(), border.tolist(), strict=True):
        odds.append(((1 - other) * known + other) / (other * known + 1 - other))
        known = odds[-1] * own
    return np.array(odds)


def likeliest_path(chunks: ChunkScores, model: TwoStates) -> list[Region]:
    """The most likely sequence of states (Viterbi algorithm)."""
    ratio, border = _ratio(chunks, model), _border(chunks, model.border_every)
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    evidence, cost = np.log(ratio).tolist(), np.log((1 - border) / border).tolist()
    # Log-odds of virus; a state that trails by more than the cost of a border is reached through one.
    lead, leads = 0.0, []
    for own, most in zip(evidence, cost, strict=True):
        lead = min(max(lead, -most), most) + own
        leads.append(lead)
    is_viral = np.zeros(len(leads), np.bool_)
    state = False
    for row in range(len(leads) - 1, -1, -1):
        is_last = row + 1 == len(leads) or is_first[row + 1]
        most = 0.0 if is_last else cost[row + 1]
        state = leads[row] > 0 if is_last else leads[row] > (-most if state else most)
        is_viral[row] = state
    return regions_of(chunks, is_viral, np.log10(ratio))


def change_points(chunks: ChunkScores, penalty: float, neutral_p: float) -> list[Region]:
    """Segments of equal mean log-odds (optimal partitioning), viral where the mean exceeds that of `neutral_p`.

    `penalty` is the cost of another segment, in units of the variance between neighbours.
    """
    is_viral = np.zeros(len(chunks.contig), np.bool_)
    for rows in _contigs(chunks):
        scored = rows[~np.isnan(chunks.p_virus[rows])]
        if not len(scored):
            continue
        logit = log_odds(chunks.p_virus[scored])
        middle = (chunks.start[scored][1:] + chunks.start[scored][:-1]) / 2
        bounds = np.concatenate(([-np.inf], middle, [np.inf]))
        for begin, end in _partition(logit, penalty):
            if logit[begin:end].mean() > np.log(neutral_p / (1 - neutral_p)):
                starts = chunks.start[rows]
                is_viral[rows[(starts >= bounds[begin]) & (starts < bounds[end])]] = True
    return regions_of(chunks, is_viral, np.nan_to_num(chunks.p_virus))


def _partition(values: Float64, penalty: float) -> list[tuple[int, int]]:
    """Segments (begin, end) that minimize the squared differences from their means plus penalties."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    squares = np.concatenate(([0.0], np.cumsum(values**2)))
    best, last = np.zeros(len(values) + 1), np.zeros(len(values) + 1, np.int64)
    for end in range(1, len(values) + 1):
        begin = np.arange(end)
        cost = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / (end - begin)
        total = best[:end] + cost + penalty * np.var(values) * 2
        last[end] = int(np.argmin(total))
        best[end] = total[last[end]]
    stretches, end = [], len(values)
    while end:
        stretches.append((int(last[end]), end))
        end = int(last[end])
    return stretches[::-1]


def _contigs(chunks: ChunkScores) -> Iterator[npt.NDArray[np.int64]]:
    """The rows of each contig."""
    bounds = np.flatnonzero(np.diff(chunks.contig, prepend=-1, append=-1))
    for begin, end in pairwise(bounds.tolist()):
        yield np.arange(begin, end)
