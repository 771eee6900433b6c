"""Calls at a promised false discovery rate: rules, and the promise in simulated samples.

A made sequence has a true log-likelihood ratio, normal with mean +-d^2 / 2 and variance d^2, so that the AUROC is
Phi(d / sqrt(2)): 0.93 for d = 2.1 and 0.98 for 2.9. Its score is a distortion of that ratio.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from virnuc_core.columns import Bool, Float64
from virnuc_core.results.fdr import Guard, call_sample, estimate_mixture

PROBABILITIES = st.lists(
    st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.9, 1.0]) | st.just(math.nan), max_size=30
)
RATES = st.floats(0.001, 0.999)
# Nothing allowed for: the rules by the book, but for pseudo-counts that are too small to matter.
TRUSTING = Guard(temperature=1, outliers=0, margin=0, pseudo_viruses=1e-9, pseudo_others=1e-9, caution=0)


@dataclass(frozen=True)
class Distortion:
    """What a classifier's log-likelihood ratios are, beside the true ones."""

    slope: float = 1.0
    shift: float = 0.0
    noise: float = 0.0
    outliers: float = 0.0

    def sequences(self, count: int, separation: float, seed: int) -> tuple[Float64, Bool]:
        """Probabilities and labels of so many sequences, half of them viruses."""
        rng = np.random.default_rng(seed)
        is_viral = np.arange(count) % 2 == 0
        scores_like_virus = is_viral | (rng.random(count) < self.outliers)
        mean = np.where(scores_like_virus, 0.5, -0.5) * separation**2
        true = mean + separation * rng.standard_normal(count)
        reported = self.slope * true + self.shift + self.noise * rng.standard_normal(count)
        return 1 / (1 + np.exp(-reported)), is_viral


CALIBRATED = Distortion()
# Calibration errors of 0.01 to 0.03.
MISCALIBRATED = {
    "overconfident": Distortion(slope=1.2),
    "underconfident": Distortion(slope=0.8),
    "too many viruses": Distortion(shift=0.3),
    "too few viruses": Distortion(shift=-0.3),
    "noisy": Distortion(noise=0.8),
    "outliers": Distortion(outliers=2e-4),
    "some of each": Distortion(slope=1.15, shift=0.2, noise=0.5, outliers=1e-4),
}


def called(p_virus: list[float], fdr: float, guard: Guard = TRUSTING) -> list[bool]:
    sample = call_sample(np.array(p_virus), 0.5, fdr, guard)
    limit = math.inf if sample is None or sample.threshold is None else sample.threshold
    return [p >= limit for p in p_virus]


@given(PROBABILITIES, RATES, st.sampled_from([TRUSTING, Guard(), Guard(caution=3, outliers=0.5)]))
@example([], 0.05, Guard())
@example([math.nan], 0.05, Guard())
@example([0.0], 0.05, Guard())
@example([1.0] * 30, 0.05, Guard())
@example([0.0] * 30, 0.999, Guard())
def test_any_sample(values: list[float], fdr: float, guard: Guard) -> None:
    p_virus = np.array(values, np.float64)
    mixture = estimate_mixture(p_virus, guard)
    is_scored = ~np.isnan(p_virus)
    assert 0 <= mixture.share_low <= mixture.share <= 1
    for column in (mixture.p_virus, mixture.p_cautious):
        assert (np.isnan(column) == ~is_scored).all()
        assert ((column[is_scored] >= 0) & (column[is_scored] <= 1)).all()
        assert (np.diff(column[is_scored][np.argsort(p_virus[is_scored])]) >= -1e-12).all()

    sample = call_sample(p_virus, 0.5, fdr, guard)
    assert (sample is None) == (not is_scored.any())
    if sample is None:
        return
    is_called = np.array(called(values, fdr, guard))
    own = 1 - mixture.p_cautious[is_called]
    assert sample.expected_false == pytest.approx(own.sum())
    assert sample.expected_fdr <= fdr * (1 + 1e-12)
    # No larger set would do.
    for lower in set(p_virus[is_scored & ~is_called]):
        assert (1 - mixture.p_cautious[p_virus >= lower]).mean() > fdr - 1e-9


@given(PROBABILITIES, st.data())
def test_the_order_does_not_matter_and_a_higher_rate_calls_more(
    values: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(values))))
    strict, shuffled = called(values, 0.05, Guard()), called([values[at] for at in order], 0.05, Guard())
    assert shuffled == [strict[at] for at in order]
    generous = called(values, 0.2, Guard())
    assert all(more or not less for less, more in zip(strict, generous, strict=True))


def test_calls_by_hand() -> None:
    """Probabilities that the shift leaves as they are, since their mean is the prior."""
    p_virus = np.array([0.99, 0.01, 0.95, 0.05, 0.9, 0.1, math.nan, 0.6, 0.4])
    mixture = estimate_mixture(p_virus, guard=TRUSTING)
    assert mixture.share == pytest.approx(0.5)
    assert mixture.share_low == pytest.approx(0.5)
    assert mixture.p_virus == pytest.approx(p_virus, nan_ok=True)
    calls = call_sample(p_virus, 0.5, 0.055, TRUSTING)
    assert calls is not None
    assert calls.threshold == 0.9
    assert calls.expected_false == pytest.approx(0.16)
    assert calls.expected_fdr == pytest.approx(0.16 / 3)
    nothing = call_sample(p_virus, 0.5, 0.005, TRUSTING)
    assert nothing is not None
    assert (nothing.threshold, nothing.expected_false, nothing.expected_fdr) == (None, 0, 0)
    from_threshold = call_sample(p_virus, 0.5, guard=TRUSTING)
    assert from_threshold is not None
    assert (from_threshold.fdr, from_threshold.threshold) == (None, 0.5)
    assert from_threshold.expected_false == pytest.approx(0.01 + 0.05 + 0.1 + 0.4)
    assert from_threshold.expected_fdr == pytest.approx(0.14)


def test_equal_probabilities_are_called_together() -> None:
    assert called([0.99, 0.8, 0.8, 0.2, 0.2, 0.01], 0.12) == [True] + [False] * 5
    assert called([0.99, 0.8, 0.8, 0.2, 0.2, 0.01], 0.15) == [True] * 3 + [False] * 3


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9])
def test_the_share_is_that_of_maximum_likelihood(share: float) -> None:
    p_virus, is_viral = CALIBRATED.sequences(40_000, 2.5, seed=1)
    rows = np.concatenate((np.flatnonzero(is_viral)[: round(20_000 * share)], np.flatnonzero(~is_viral)))
    rows = rows[: round(20_000 * share) + round(20_000 * (1 - share))]
    ratios = p_virus[rows] / (1 - p_virus[rows])
    mixture = estimate_mixture(p_virus[rows], TRUSTING)
    best = minimize_scalar(lambda at: -np.log1p(at * (ratios - 1)).sum(), bounds=(0, 1), method="bounded")
    assert mixture.share == pytest.approx(best.x, abs=1e-4)
    assert mixture.share == pytest.approx(share, abs=0.012)
    # The fixed point of EM.
    assert mixture.p_virus.mean() == pytest.approx(mixture.share, abs=1e-6)
    lower = estimate_mixture(p_virus[rows], replace(TRUSTING, caution=2)).share_low
    assert mixture.share - 0.02 < lower < mixture.share


def test_the_guard_bounds_ratios_and_shrinks_small_samples() -> None:
    certain = np.array([1.0])
    assert estimate_mixture(certain, guard=Guard(outliers=0.01)).p_virus[0] > 0.999
    assert estimate_mixture(certain, guard=Guard(outliers=0.01)).p_cautious[0] < 0.99
    assert estimate_mixture(np.zeros(18)).share == pytest.approx(0.5 / 20, abs=1e-3)
    assert estimate_mixture(np.array([])).share == pytest.approx(0.25)
    assert estimate_mixture(np.array([])).share_low < 0.25


def test_a_single_sequence_can_be_called() -> None:
    assert called([0.9999], 0.05, Guard()) == [True]
    assert called([0.9], 0.05, Guard()) == [False]
    assert called([0.0001], 0.05, Guard()) == [False]
    assert called([1.0] * 20, 0.05, Guard()) == [True] * 20
    # One among many others has to be more certain.
    assert not any(called([0.99] + [0.001] * 199, 0.05, Guard()))


def rates(
    distortion: Distortion, share: float, size: int, repeats: int, fdr: float, guard: Guard
) -> tuple[float, float, float]:
    """Mean share of false calls in samples drawn with replacement, that of all their calls, NaN of few, and recall.

    The scores have an AUROC of 0.98.
    """
    p_virus, is_viral = distortion.sequences(200_000, 2.9, seed=3)
    rng = np.random.default_rng(0)
    others, viruses = np.flatnonzero(~is_viral), np.flatnonzero(is_viral)
    counts = np.empty((repeats, 3), np.int64)
    for repeat in range(repeats):
        viral = int(rng.binomial(size, share))
        sample = p_virus[np.concatenate((rng.choice(viruses, viral), rng.choice(others, size - viral)))]
        is_called = np.array(called(sample.tolist(), fdr, guard))
        counts[repeat] = viral, is_called.sum(), is_called[viral:].sum()
    viral_total, calls, false = counts.sum(0).tolist()
    mean = float((counts[:, 2] / np.maximum(1, counts[:, 1])).mean())
    return mean, false / calls if calls >= 100 else math.nan, (calls - false) / viral_total


@pytest.mark.parametrize(("fdr", "most"), [(0.05, 0.07), (0.1, 0.13)])
@pytest.mark.parametrize("share", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("name", ["calibrated", *MISCALIBRATED])
def test_the_promise_is_kept(name: str, share: float, fdr: float, most: float) -> None:
    distortion = MISCALIBRATED.get(name, CALIBRATED)
    # Ten viruses a sample, and more samples of them.
    mean, pooled, _ = rates(distortion, share, 2000, 60 if share == 0.005 else 10, fdr, Guard())
    assert mean <= most
    assert not pooled > most
    if name in ("calibrated", "overconfident", "some of each"):
        assert rates(distortion, share, 20, 200, fdr, Guard())[0] <= most, "in small samples"


def test_without_the_guard_the_promise_breaks() -> None:
    assert rates(CALIBRATED, 0.01, 4000, 10, 0.1, TRUSTING)[0] < 0.13
    assert rates(MISCALIBRATED["overconfident"], 0.01, 4000, 10, 0.1, TRUSTING)[0] > 0.2
    assert rates(MISCALIBRATED["overconfident"], 0.01, 4000, 10, 0.1, Guard())[0] < 0.13


def test_the_guard_costs_little_where_viruses_are_common() -> None:
    free, guarded = (rates(CALIBRATED, 0.3, 4000, 5, 0.05, guard)[2] for guard in (TRUSTING, Guard()))
    assert free - 0.15 < guarded < free
