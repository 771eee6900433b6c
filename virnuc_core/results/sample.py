"""What the scores of one sample say of its share of viruses, and from which score its contigs are called.

A score is calibrated for as many viruses as others. A sample has a share of its own. It is estimated from the sample's scores by
maximum likelihood, and the probabilities are shifted to it. Contigs are called that are probably viruses at that share, or as many as
keep the expected share of false calls below the rate that is asked for.

Scores are only about calibrated, so their likelihood ratios are tempered and bounded before.

Sources: Saerens, Latinne and Decaestecker (2002), "Adjusting the outputs of a classifier to new a priori probabilities", Neural
Computation 14, 21-41, for the share; Storey (2003), "The positive false discovery rate: a Bayesian interpretation and the
q-value", Annals of Statistics 31, 2013-2035, for the rate.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import brentq

from virnuc_core.columns import Float64
from virnuc_core.specs import CallRule

MIN_PROBABILITY: Final = 0.6  # of a call, at the sample's share of viruses
# Sequences that stand for what is known before a sample is seen, and their share of viruses.
PRIOR_WEIGHT: Final = 10.0
PRIOR_SHARE: Final = 0.1
# Share of non-viruses that score like viruses, such as prophage remnants: no likelihood ratio exceeds its inverse.
_OUTLIERS: Final = 1e-4
_TEMPERATURE: Final = 1.15


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCalls:
    """What is known of a sample and its calls; `sample` in run.json.

    Attributes:
        share: of viruses among the contigs with a score: estimated, or the prior that was given.
        threshold: `virus_score` from which sequences are called; None if nothing can be called.
        expected_false: expected number of false calls of contigs and proviruses.
        expected_fdr: their expected share of the calls; 0 without calls.
    """

    share: float
    threshold: float | None
    expected_false: float
    expected_fdr: float

    @property
    def in_words(self) -> str:
        """The expected false calls."""
        return f"expected false positives: {self.expected_false:.1f} ({self.expected_fdr:.1%})"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The scores of a sample at its share of viruses.

    Attributes:
        share: 0..1.
        scores: float64 (n,) the sample's own, ascending.
    """

    share: float
    scores: Float64

    @classmethod
    def of(cls, scores: Float64, prior: float | None = None) -> "Mixture | None":
        """Of the scores of all contigs of a sample (n,), NaN without one; `prior` is the share if it is known.

        None if no contig has a score.
        """
        known = np.sort(scores[~np.isnan(scores)])
        if not len(known):
            return None
        return cls(_estimated_share(_likelihood_ratios(known)) if prior is None else prior, known)

    def p_virus(self, scores: Float64) -> Float64:
        """Probabilities of viruses (n,) at the sample's share; NaN stays."""
        weighted = self.share * _likelihood_ratios(scores)
        return np.asarray(weighted / (weighted + 1 - self.share))

    def fdr(self, scores: Float64) -> Float64:
        """Expected share of false calls (n,) among the sample's contigs with each of these scores or more."""
        false = np.append(np.cumsum(1 - self.p_virus(self.scores)[::-1])[::-1], 0.0)
        first = np.searchsorted(self.scores, scores)
        count = len(self.scores) - first
        return np.where(count > 0, false[first] / np.maximum(count, 1), 1 - self.p_virus(scores))

    def threshold(self, rule: CallRule) -> float:
        """The score from which sequences are called, infinite if none can be."""
        if rule.threshold is not None:
            return rule.threshold
        if rule.fdr is None:
            is_fit = self.p_virus(self.scores) >= MIN_PROBABILITY
        else:
            is_fit = self.fdr(self.scores) <= rule.fdr
        return float(self.scores[is_fit.argmax()]) if is_fit.any() else math.inf


def sample_calls(mixture: Mixture, threshold: float, called: Float64) -> SampleCalls:
    """What is known of a sample whose contigs and proviruses with these scores (n,) are called."""
    expected_false = float((1 - mixture.p_virus(np.sort(called))).sum())
    return SampleCalls(
        share=mixture.share,
        threshold=threshold if math.isfinite(threshold) else None,
        expected_false=expected_false,
        expected_fdr=expected_false / max(1, len(called)),
    )


def _likelihood_ratios(scores: Float64) -> Float64:
    # Bounded, so that scores of 0 and 1 give finite ones.
    bounded = np.clip(scores, 1e-12, 1 - 1e-12)
    ratios = np.exp((np.log(bounded) - np.log1p(-bounded)) / _TEMPERATURE)
    return np.asarray(ratios / (1 - _OUTLIERS + _OUTLIERS * ratios))


def _estimated_share(ratios: Float64) -> float:
    """The most probable share: that which one step of EM, with the prior's sequences, does not change."""
    viruses = PRIOR_WEIGHT * PRIOR_SHARE

    def surplus(share: float) -> float:
        posterior = share * ratios / (share * ratios + 1 - share)
        return float(posterior.sum() + viruses - share * (len(ratios) + PRIOR_WEIGHT))

    return float(brentq(surplus, 1e-12, 1 - 1e-12, xtol=1e-12))
