"""Ways from chunk scores to viral regions that were compared with the one in `virnuc_core.prediction.regions`."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.prediction.regions import (
    ChunkScores,
    Region,
    RegionModel,
    border_probability,
    find_regions,
    likelihood_ratio,
    regions_of,
)

Float64 = npt.NDArray[np.float64]
Method = Callable[[ChunkScores], list[Region]]

BORDERS: Final = (5_000.0, 7_500.0, 10_000.0, 15_000.0, 20_000.0, 30_000.0, 50_000.0, 100_000.0)
DOUBTS: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
NEUTRAL_PS: Final = (0.3, 0.35, 0.4, 0.45, 0.5)
PENALTIES: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_LARGEST_LOGIT: Final = 4.0


def methods() -> dict[str, dict[str, Method]]:
    """Every method with every setting that was tried, by name and setting."""
    models = {
        f"border_every={border:.0f} doubt={doubt} neutral_p={neutral}": RegionModel(
            border_every=border, doubt=doubt, neutral_p=neutral
        )
        for border in BORDERS
        for doubt in DOUBTS
        for neutral in NEUTRAL_PS
    }
    return {
        "posterior": {name: partial(find_regions, model=model) for name, model in models.items()},
        "viterbi": {name: partial(likeliest_path, model=model) for name, model in models.items()},
        "change points": {
            f"penalty={penalty} neutral_p={neutral}": partial(
                change_points, penalty=penalty, neutral_p=neutral
            )
            for penalty in PENALTIES
            for neutral in NEUTRAL_PS
        },
        "chunks alone": {f"neutral_p={neutral}": partial(alone, neutral_p=neutral) for neutral in NEUTRAL_PS},
    }


def alone(chunks: ChunkScores, neutral_p: float) -> list[Region]:
    """Each chunk by its own score."""
    scores = np.nan_to_num(chunks.p_virus)
    return regions_of(chunks, scores >= neutral_p, scores)


def likeliest_path(chunks: ChunkScores, model: RegionModel) -> list[Region]:
    """The likeliest sequence of states of the same hidden Markov model (Viterbi algorithm)."""
    ratio = likelihood_ratio(chunks.p_virus, model)
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    border = border_probability(chunks.start, is_first, model)
    evidence, cost = np.log(ratio).tolist(), np.log((1 - border) / border).tolist()
    # The lead of virus over other; a state that is behind by more than a border costs is reached by one.
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
    return regions_of(chunks, _with_scores(chunks, is_viral), np.log10(ratio))


def change_points(chunks: ChunkScores, penalty: float, neutral_p: float) -> list[Region]:
    """Stretches of equal mean log-odds (optimal partitioning); those whose mean is above that of `neutral_p` are viral.

    Args:
        chunks: of some contigs.
        penalty: what a further stretch costs, in units of the variance between neighbours.
        neutral_p: p_virus from which a stretch is viral.
    """
    is_viral = np.zeros(len(chunks.contig), np.bool_)
    for rows in _contigs(chunks):
        scored = rows[~np.isnan(chunks.p_virus[rows])]
        if not len(scored):
            continue
        p = np.clip(chunks.p_virus[scored], 1e-9, 1 - 1e-9)
        logit = np.clip(np.log(p / (1 - p)), -_LARGEST_LOGIT, _LARGEST_LOGIT)
        middle = (chunks.start[scored][1:] + chunks.start[scored][:-1]) / 2
        bounds = np.concatenate(([-np.inf], middle, [np.inf]))
        for begin, end in _partition(logit, penalty):
            if logit[begin:end].mean() > np.log(neutral_p / (1 - neutral_p)):
                starts = chunks.start[rows]
                is_viral[rows[(starts >= bounds[begin]) & (starts < bounds[end])]] = True
    return regions_of(chunks, _with_scores(chunks, is_viral), np.nan_to_num(chunks.p_virus))


def _partition(values: Float64, penalty: float) -> list[tuple[int, int]]:
    """The stretches (begin, end) with the least sum of squared differences from their means, and of penalties."""
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


def _with_scores(chunks: ChunkScores, is_viral: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Leaves out runs of viral chunks of which none is scored."""
    is_first = np.diff(chunks.contig, prepend=-1) != 0
    run = np.cumsum(is_first | (is_viral != np.roll(is_viral, 1)))
    scored = np.bincount(run, ~np.isnan(chunks.p_virus)) > 0
    return np.asarray(is_viral & scored[run])
