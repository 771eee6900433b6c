"""Calls of one sample at a promised false discovery rate, from calibrated probabilities and the sample's own mixture.

A probability is calibrated for as many viruses as others. A sample has a share of its own. It is estimated from the sample's
scores alone by maximum likelihood, the probabilities are shifted to it, and the calls are the largest set whose mean probability
of not being a virus is at most the promised rate.

The promise has to hold for scores that are only about calibrated and for samples of any size, so a `Guard` stands between the
scores and the calls. Without it, scores with an AUROC of 0.98 that are a fifth too confident (a calibration error of 0.02) give
35 % false calls for a promise of 10 % where 0.5 % are viruses. The tests show what the guard is worth.

Sources: Saerens, Latinne and Decaestecker (2002), "Adjusting the outputs of a classifier to new a priori probabilities", Neural
Computation 14, 21-41, for the share; Storey (2003), "The positive false discovery rate: a Bayesian interpretation and the
q-value", Annals of Statistics 31, 2013-2035, and Müller, Parmigiani, Robert and Rousseau (2004), "Optimal sample size for
multiple testing", Journal of the American Statistical Association 99, 990-1001, for the calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from virnuc_core.columns import Float64

_LOG_ODDS_BOUND: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """What keeps the promise although calibration is imperfect and samples are small.

    The defaults are the least cautious of a few that keep the promise on simulated scores with calibration errors of up to 0.03,
    and on the validation genomes of the bundled models. They cost recall, the more the fewer viruses there are: where 0.5 % are,
    next to nothing is called.

    Attributes:
        temperature: divides the log-likelihood ratios, for classifiers that are overconfident on new data; 1 trusts them.
        outliers: share of non-viruses assumed to score like viruses (prophage remnants, wrong labels), so that no likelihood
            ratio exceeds 1 / outliers; 0 for none.
        margin: subtracted from the log-likelihood ratios, for classifiers that find too many viruses; 0 for none.
        pseudo_viruses: added to the number of viruses when the share is estimated, > 0 (a Beta prior of the share).
        pseudo_others: added to the number of the others, > 0.
        caution: calls are made for the lower end of the likelihood interval of the share, this many standard deviations below
            the estimate; 0 takes the estimate itself.
    """

    temperature: float = 1.15
    outliers: float = 1e-4
    margin: float = 0.05
    pseudo_viruses: float = 0.5
    pseudo_others: float = 1.5
    caution: float = 0.35


DEFAULT_GUARD: Final = Guard()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """One sample's share of viruses, and its probabilities for that share.

    Attributes:
        share: estimated share of viruses among the sequences with a probability, 0..1; that of the guard's pseudo-counts if there
            are none.
        share_low: lower end of the likelihood interval of the share, with what the guard allows for; at most `share`.
        p_virus: float64 (n,) P(virus) at `share` if calibration is perfect, NaN where not scored.
        p_cautious: float64 (n,) P(virus) at `share_low`, with what the guard allows for.
    """

    share: float
    share_low: float
    p_virus: Float64
    p_cautious: Float64


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCalls:
    """What is known of a sample with scores, and of its calls; `sample` in run.json.

    Attributes:
        prior: share of viruses that the probabilities are calibrated for.
        share: as in `Mixture`, like `share_low`.
        fdr: promised false discovery rate, at most; None for calls from a given threshold on.
        threshold: probability from which sequences are called; None if no call keeps the promise.
        expected_fdr: expected share of false calls among the calls, 0 without calls; with `fdr`, a cautious estimate.
        expected_false: expected number of false calls, likewise.
    """

    prior: float
    share: float
    share_low: float
    fdr: float | None
    threshold: float | None
    expected_fdr: float
    expected_false: float

    def in_words(self, calls: int) -> str:
        """One line about contigs, of which so many are called."""
        share = f"Viruses among the scored contigs: about {_percent(self.share)} (cautiously {_percent(self.share_low)})"
        promise = "" if self.fdr is None else f" for a false discovery rate of at most {_percent(self.fdr)}"
        if self.threshold is None:
            return f"{share}; no contig can be called{promise}"
        begin = f", called from p_virus {self.threshold:.4g} on{promise}" if promise else ""
        false = f"{self.expected_false:,.0f}" if self.expected_false >= 10 else f"{self.expected_false:.2g}"
        expected = f"{false} of {calls:,} ({_percent(self.expected_fdr)})"
        return f"{share}; false calls to expect: {expected}{begin}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def estimate_mixture(p_virus: Float64, guard: Guard = DEFAULT_GUARD) -> Mixture:
    """Estimates the share of viruses of one sample and shifts its probabilities to that share.

    The share is the fixed point of the EM algorithm of Saerens et al. with the guard's pseudo-counts; the posterior is
    log-concave, so bisection finds the only one there is.

    Args:
        p_virus: float64 (n,) P(virus), calibrated for as many viruses as others; NaN where not scored.
        guard: what to allow for.
    """
    is_scored = ~np.isnan(p_virus)
    with np.errstate(divide="ignore"):
        log_ratios = np.log(p_virus[is_scored]) - np.log1p(-p_virus[is_scored])
    # Bounded, so that probabilities of 0 and 1 give finite ones.
    log_ratios = np.clip(log_ratios, -_LOG_ODDS_BOUND, _LOG_ODDS_BOUND)
    ratios, guarded = np.exp(log_ratios), np.exp(log_ratios / guard.temperature - guard.margin)
    guarded /= 1 - guard.outliers + guard.outliers * guarded
    share = _estimated_share(ratios, guard)
    low = min(share, _lower_share(guarded, guard))
    at_share, at_low = np.full(len(p_virus), np.nan), np.full(len(p_virus), np.nan)
    at_share[is_scored], at_low[is_scored] = _posterior(ratios, share), _posterior(guarded, low)
    return Mixture(share=share, share_low=low, p_virus=at_share, p_cautious=at_low)


def call_sample(
    p_virus: Float64, threshold: float, fdr: float | None = None, guard: Guard = DEFAULT_GUARD
) -> SampleCalls | None:
    """What is known of a sample called at a false discovery rate, or without one from a threshold on; None without a score.

    At a rate, the largest set of the most probable viruses is called whose expected rate, the mean of 1 - p_cautious, is at most
    `fdr`; sequences of equal probability are called together.

    Args:
        p_virus: float64 (n,), as for `estimate_mixture`.
        threshold: probability from which sequences are called without a rate.
        fdr: promised rate, between 0 and 1.
        guard: what to allow for.
    """
    if np.isnan(p_virus).all():
        return None
    mixture = estimate_mixture(p_virus, guard)
    found: float | None = threshold
    if fdr is None:
        false = 1 - mixture.p_virus[p_virus >= threshold]
        count, expected_false = len(false), float(false.sum())
    else:
        scored = np.flatnonzero(~np.isnan(p_virus))
        ranked = scored[np.argsort(-p_virus[scored], kind="stable")]
        false = np.cumsum(1 - mixture.p_cautious[ranked])
        is_end = np.append(np.diff(p_virus[ranked]) != 0, True)
        fits = np.flatnonzero(is_end & (false <= fdr * np.arange(1, len(ranked) + 1)))
        count, found, expected_false = 0, None, 0.0
        if len(fits):
            count, found, expected_false = (
                int(fits[-1]) + 1,
                float(p_virus[ranked[fits[-1]]]),
                float(false[fits[-1]]),
            )
    return SampleCalls(
        prior=0.5,  # heads are calibrated with equal weight of viruses and others
        share=mixture.share,
        share_low=mixture.share_low,
        fdr=fdr,
        threshold=found,
        expected_fdr=expected_false / max(1, count),
        expected_false=expected_false,
    )


def _posterior(ratios: Float64, share: float) -> Float64:
    return np.asarray(share * ratios / (share * ratios + (1 - share)))


def _estimated_share(ratios: Float64, guard: Guard) -> float:
    """The share that one step of EM, with the pseudo-counts, does not change."""
    total = len(ratios) + guard.pseudo_viruses + guard.pseudo_others
    # Sorted, so that the order of the sequences does not reach the last digit of a sum.
    ascending = np.sort(ratios)
    return _bisect(
        lambda share: _posterior(ascending, share).sum() + guard.pseudo_viruses > share * total,
        _LOG_ODDS_BOUND,
    )


def _lower_share(ratios: Float64, guard: Guard) -> float:
    """The share below the estimated one at which the log-posterior has fallen by caution^2 / 2."""
    ascending, share = np.sort(ratios), _estimated_share(ratios, guard)

    def log_posterior(share: float) -> float:
        pseudo = guard.pseudo_viruses * np.log(share) + guard.pseudo_others * np.log1p(-share)
        return float(np.log1p(share * (ascending - 1)).sum() + pseudo)

    floor = log_posterior(share) - guard.caution**2 / 2
    return _bisect(lambda low: log_posterior(low) < floor, math.log(share / (1 - share)))


def _bisect(is_below: Callable[[float], bool], high: float) -> float:
    """The share, between log-odds of -_LOG_ODDS_BOUND and `high`, at which `is_below` turns from True to False."""

    def share_of(log_odds: float) -> float:
        return 1 / (1 + math.exp(-log_odds))

    low = -_LOG_ODDS_BOUND
    for _ in range(60):  # to less than the resolution of a double
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(share_of(middle)) else (low, middle)
    return share_of(high)
