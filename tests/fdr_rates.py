"""What became of promised false discovery rates, in samples drawn from labelled sequences."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from virnuc_core.results.fdr import DEFAULT_GUARD, Guard, call_at_fdr, estimate_mixture

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureDesign:
    """Samples made of labelled sequences: `repeats` of `size` each, with viruses drawn with probability `share`."""

    share: float
    size: int
    repeats: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedRates:
    """What became of a promise, over all samples of a design.

    Attributes:
        calls: number in all samples.
        fdr: mean over the samples of the share of false calls among the calls, 0 in samples without calls.
        pooled_fdr: share of false calls among the calls of all samples, None without calls. Where most samples have no virus,
            it is above `fdr`, which the promise is about.
        recall: share of the viruses of all samples that were called, None without viruses.
    """

    calls: int
    fdr: float
    pooled_fdr: float | None
    recall: float | None


def observe_rates(
    p_virus: Float64,
    is_viral: Bool,
    design: MixtureDesign,
    fdr: float,
    guard: Guard = DEFAULT_GUARD,
) -> ObservedRates:
    """Keeps score of a promise in samples drawn, with replacement, from labelled sequences.

    Args:
        p_virus: float64 (n,) as for `estimate_mixture`.
        is_viral: bool (n,), the labels; both kinds are needed.
        design: the samples to draw.
        fdr: promised rate.
        guard: what to allow for.

    Raises:
        ValueError: a value is out of range, or the sequences are all of one kind.
    """
    rng = np.random.default_rng(design.seed)
    others, viruses = np.flatnonzero(~is_viral), np.flatnonzero(is_viral)
    counts = np.empty((design.repeats, 3), np.int64)
    for repeat in range(design.repeats):
        viral = int(rng.binomial(design.size, design.share))
        rows = np.concatenate((rng.choice(viruses, viral), rng.choice(others, design.size - viral)))
        sample = p_virus[rows]
        is_called = call_at_fdr(sample, estimate_mixture(sample, guard), fdr).is_virus
        counts[repeat] = viral, is_called.sum(), is_called[viral:].sum()
    viral_total, calls, false = counts.sum(0).tolist()
    return ObservedRates(
        calls=calls,
        fdr=float((counts[:, 2] / np.maximum(1, counts[:, 1])).mean()),
        pooled_fdr=false / calls if calls else None,
        recall=(calls - false) / viral_total if viral_total else None,
    )
