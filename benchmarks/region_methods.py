"""Alternatives to `virnuc_core.results.regions` for finding viral regions from chunk scores."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.results.regions import ChunkScores, Region, RegionModel, find_regions, log_odds, regions_of

Float64 = npt.NDArray[np.float64]
Method = Callable[[ChunkScores], list[Region]]

DISTANCES: Final = (5_000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 100_000.0, 200_000.0)
NEUTRAL_PS: Final = (0.3, 0.35, 0.4, 0.45, 0.5)


def methods() -> dict[str, dict[str, Method]]:
    """Every method with every tested setting, by name and setting."""
    two_states = {
        "border_every": DISTANCES,
        "doubt": (0.02, 0.05, 0.1, 0.2, 0.3),
        "neutral_p": NEUTRAL_PS,
    }
    return {
        "levels": _grid(
            levels,
            change_cost=(0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0),
            most_change_cost=(0.125, 0.167, 0.2, 0.25, 0.333, 0.5),
            least_change_cost=(0.0, 10.0, 20.0, 31.0, 40.0, 60.0),
        ),
        "two states, posterior": _grid(likelier_states, **two_states),
        "two states, likeliest path": _grid(likeliest_path, **two_states),
        "change points": _grid(
            change_points, penalty=(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), neutral_p=NEUTRAL_PS
        ),
        "chunks alone": _grid(alone, neutral_p=NEUTRAL_PS),
    }


def _grid(method: Callable[..., list[Region]], **choices: Sequence[float]) -> dict[str, Method]:
    settings = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return {
        " ".join(f"{name}={value:g}" for name, value in setting.items()): partial(method, **setting)
        for setting in settings
    }


def levels(chunks: ChunkScores, **parameters: float) -> list[Region]:
    """The method of `virnuc predict`."""
    return find_regions(chunks, RegionModel(**parameters))


def alone(chunks: ChunkScores, neutral_p: float) -> list[Region]:
    """Each chunk by its own score."""
    scores = np.nan_to_num(chunks.p_virus)
    return regions_of(chunks, scores >= neutral_p, scores)


def likelier_states(chunks: ChunkScores, border_every: float, doubt: float, neutral_p: float) -> list[Region]:
    """The more likely state of each chunk in a two-state hidden Markov model (forward-backward algorithm).

    Args:
        chunks: their scores.
        border_every: mean distance in bp between borders.
        doubt: probability that a chunk reports the wrong state.
        neutral_p: the p_virus that favours neither state.
    """
    ratio, border = _ratio(chunks, doubt, neutral_p), _border(chunks, border_every)
    before = _expected(ratio, border)
    after = _expected(ratio[::-1], np.roll(border, -1)[::-1])[::-1]
    return regions_of(chunks, ratio * before * after > 1, np.log10(ratio))


def _ratio(chunks: ChunkScores, doubt: float, neutral_p: float) -> Float64:
    """float64 (C,): likelihood ratio of virus, bounded by doubt; 1 for NaN."""
    p = np.where(np.isnan(chunks.p_virus), neutral_p, chunks.p_virus)
    virus, other = p * (1 - neutral_p), (1 - p) * neutral_p
    return np.asarray(((1 - doubt) * virus + doubt * other) / (doubt * virus + (1 - doubt) * other))


def _is_first(chunks: ChunkScores) -> npt.NDArray[np.bool_]:
    """Bool (C,): whether a chunk is the first of its contig."""
    return np.asarray(np.diff(chunks.contig, prepend=-1) != 0)


def _border(chunks: ChunkScores, border_every: float) -> Float64:
    """float64 (C,): probability of a change of state since the previous chunk; 1/2 for the first of a contig."""
    distance = np.where(_is_first(chunks), np.inf, np.diff(chunks.start, prepend=0))
    return np.asarray(-np.expm1(-2 * distance / border_every) / 2)


def _expected(ratio: Float64, border: Float64) -> Float64:
    """float64 (C,): odds of virus for each chunk, from the preceding chunks only."""
    odds, known = [], 1.0
    for own, other in zip(ratio.tolist(), border.tolist(), strict=True):
        odds.append(((1 - other) * known + other) / (other * known + 1 - other))
        known = odds[-1] * own
    return np.array(odds)


def likeliest_path(chunks: ChunkScores, border_every: float, doubt: float, neutral_p: float) -> list[Region]:
    """The most likely sequence of states in the same model (Viterbi algorithm)."""
    ratio, border = _ratio(chunks, doubt, neutral_p), _border(chunks, border_every)
    evidence, cost = np.log(ratio).tolist(), np.log((1 - border) / border).tolist()
    # Log-odds of virus; a state that trails by more than the cost of a border is reached through one.
    lead, leads = 0.0, []
    for own, most in zip(evidence, cost, strict=True):
        lead = min(max(lead, -most), most) + own
        leads.append(lead)
    is_viral = np.zeros(len(leads), np.bool_)
    is_last, state = np.roll(_is_first(chunks), -1), False
    for row in range(len(leads) - 1, -1, -1):
        most = 0.0 if is_last[row] else cost[row + 1]
        state = leads[row] > (-most if state else most)
        is_viral[row] = state
    return regions_of(chunks, is_viral, np.log10(ratio))


def change_points(chunks: ChunkScores, penalty: float, neutral_p: float) -> list[Region]:
    """Segments of equal mean log-odds (optimal partitioning), viral where the mean exceeds that of `neutral_p`.

    `penalty` is the cost of another segment, in units of the variance between neighbours.
    """
    is_viral = np.zeros(len(chunks.contig), np.bool_)
    for rows in np.split(np.arange(len(chunks.contig)), np.flatnonzero(_is_first(chunks))[1:]):
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
