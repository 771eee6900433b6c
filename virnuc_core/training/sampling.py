"""How often each frame is learnt from, so that neither class and no large family drowns the rest."""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def sample_weights(is_viral: npt.NDArray[np.bool_], groups: Int64, group_power: float) -> Float64:
    """Probability of drawing each frame, float64 (n,), sums to 1.

    Viruses and the rest get half each. Within a half, a group of m frames is drawn as often as
    m ** group_power says, so that much-sequenced groups do not drown the others.

    Args:
        is_viral: (n,), of the record of each frame.
        groups: (n,), not negative.
        group_power: 1 treats frames alike, 0 groups.
    """
    size = np.maximum(np.bincount(groups), 1)
    weights: Float64 = (size.astype(float) ** (group_power - 1))[groups]
    for half in (is_viral, ~is_viral):
        weights[half] *= 0.5 / weights[half].sum()
    return weights


def thin(weights: Float64, most: int, rng: np.random.Generator) -> tuple[Int64, Float64]:
    """Drops frames so that about `most` are left, and drawing from these by their weights is as before on average.

    Frames that are drawn rarely are dropped more often, and those that are left stand for the dropped ones.

    Args:
        weights: (n,), sums to 1.
        most: how many frames may be left, about.
        rng: source of the draws.

    Returns:
        The rows that are left, ascending, and their new weights, which sum to 1.
    """
    if len(weights) <= most:
        return np.arange(len(weights)), weights
    kept_share = np.minimum(1.0, most * weights)
    for _ in range(20):  # what is cut off at 1 is shared out among the others
        kept_share = np.minimum(1.0, kept_share * most / kept_share.sum())
    rows = np.flatnonzero(rng.random(len(weights)) < kept_share)
    left = weights[rows] / kept_share[rows]
    return rows, left / left.sum()
