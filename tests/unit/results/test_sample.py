"""A sample's share of viruses and its calls: rules, and precision in simulated samples.

A made sequence has a log-likelihood ratio that is normal with mean +-d^2 / 2 and variance d^2, so that its score is calibrated and the
AUROC is Phi(d / sqrt(2)): 0.98 for d = 2.9 and 0.998 for 4.
"""

import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.columns import Bool, Float64
from virnuc_core.results.sample import Mixture, sample_calls
from virnuc_core.specs import CallRule

SCORES = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.9, 1.0]) | st.just(math.nan), max_size=30)
RULES = st.builds(
    CallRule, fdr=st.none() | st.floats(0.001, 0.999), prior=st.none() | st.floats(0.001, 0.999)
)
DEFAULT = CallRule()


def simulated(count: int, share: float, separation: float, seed: int = 0) -> tuple[Float64, Bool]:
    """Scores and labels of so many sequences."""
    rng = np.random.default_rng(seed)
    is_viral = np.arange(count) < round(share * count)
    log_ratio = np.where(is_viral, 0.5, -0.5) * separation**2 + separation * rng.standard_normal(count)
    return 1 / (1 + np.exp(-log_ratio)), is_viral


def called(scores: Float64, rule: CallRule = DEFAULT) -> Bool:
    mixture = Mixture.of(scores, rule.prior)
    return np.asarray(scores >= (mixture.threshold(rule) if mixture else math.inf))


@given(SCORES, RULES, st.randoms(use_true_random=False))
@example([], DEFAULT, None)
@example([math.nan], DEFAULT, None)
@example([0.0], DEFAULT, None)
@example([1.0] * 30, CallRule(fdr=0.05), None)
@example([0.0] * 30, CallRule(fdr=0.999), None)
def test_any_sample(values: list[float], rule: CallRule, order: random.Random | None) -> None:
    scores = np.array(values, np.float64)
    is_scored = ~np.isnan(scores)
    mixture = Mixture.of(scores, rule.prior)
    assert (mixture is None) == (not is_scored.any())
    if mixture is None:
        return
    assert 0 < mixture.share < 1
    assert rule.prior in (None, mixture.share)
    p_virus, ascending = mixture.p_virus(scores), np.argsort(scores[is_scored])
    assert (np.isnan(p_virus) == ~is_scored).all()
    assert (np.diff(p_virus[is_scored][ascending]) >= 0).all()

    is_called = called(scores, rule)
    assert not is_called[~is_scored].any()
    own = sample_calls(mixture, mixture.threshold(rule), scores[is_called])
    assert own.share == mixture.share
    assert own.threshold == (scores[is_called].min() if is_called.any() else None)
    assert own.expected_false == pytest.approx((1 - p_virus[is_called]).sum())
    assert own.expected_fdr == pytest.approx(own.expected_false / max(1, is_called.sum()))
    if is_called.any():
        assert own.expected_fdr == pytest.approx(mixture.fdr(np.array([own.threshold]))[0])
    if rule.fdr is not None:
        assert own.expected_fdr <= rule.fdr * (1 + 1e-12)
        for lower in set(scores[is_scored & ~is_called]):
            assert (1 - p_virus[scores >= lower]).mean() > rule.fdr - 1e-9, "no larger set would do"
    if order:
        places = list(range(len(scores)))
        order.shuffle(places)
        assert called(scores[places], rule).tolist() == is_called[places].tolist()


def test_equal_scores_are_called_together() -> None:
    scores = np.repeat([0.999, 0.9, 0.6, 0.01], 5)
    for fdr in np.linspace(0.001, 0.5, 50).tolist():
        assert called(scores, CallRule(fdr=fdr)).sum() % 5 == 0


@pytest.mark.parametrize("share", [0.02, 0.2, 0.9])
def test_the_share_is_estimated(share: float) -> None:
    scores, _ = simulated(20_000, share, separation=4)
    mixture = Mixture.of(scores)
    assert mixture is not None
    assert mixture.share == pytest.approx(share, rel=0.25)


def test_a_given_prior_replaces_the_estimate() -> None:
    scores, _ = simulated(2000, 0.2, separation=2.9)
    numbers = [called(scores, CallRule(prior=prior)).sum() for prior in (0.001, 0.1, 0.9)]
    assert numbers == sorted(set(numbers))


def test_a_threshold_needs_no_estimate() -> None:
    scores, _ = simulated(2000, 0.01, separation=2.9)
    assert called(scores, CallRule(threshold=0.5)).tolist() == (scores >= 0.5).tolist()


@pytest.mark.parametrize(("share", "recall"), [(0.02, 0.6), (0.1, 0.75), (0.5, 0.85)])
@pytest.mark.parametrize("size", [500, 5000])
def test_most_calls_are_right_whatever_the_share(size: int, share: float, recall: float) -> None:
    calls, right, viral = np.sum(
        [
            (is_called.sum(), (is_called & is_viral).sum(), is_viral.sum())
            for seed in range(20)
            for scores, is_viral in [simulated(size, share, separation=4, seed=seed)]
            for is_called in [called(scores)]
        ],
        axis=0,
    )
    assert right / calls >= 0.9
    assert right / viral >= recall


@pytest.mark.parametrize("separation", [2.1, 2.9, 4])
@pytest.mark.parametrize("size", [30, 2000])
def test_next_to_nothing_is_called_without_viruses(size: int, separation: float) -> None:
    number = sum(called(simulated(size, 0, separation, seed)[0]).sum() for seed in range(20))
    assert number <= 0.005 * 20 * size


def test_one_contig_alone_is_called_if_it_is_nearly_certain() -> None:
    assert [called(np.array([score])).tolist() for score in (0.9999, 0.5)] == [[True], [False]]
