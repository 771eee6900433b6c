from collections.abc import Sequence

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score

from virnuc_core.training.metrics import KnownCalls, Metrics, calibration_error, measure


def measured(
    is_viral: Sequence[bool] | np.ndarray, p_virus: Sequence[float] | np.ndarray, lengths: Sequence[int] = ()
) -> Metrics:
    p, viral = np.array(p_virus, float), np.array(is_viral, bool)
    return measure(
        KnownCalls(
            is_viral=viral,
            p_virus=p,
            classes=np.where(viral, 0, 1),
            class_names=("viral", "other"),
            lengths=np.array(lengths or [500] * len(p)),
        )
    )


def test_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    is_viral = rng.random(500) < 0.3
    p = np.clip(rng.normal(0.4 + 0.2 * is_viral, 0.2), 0, 1)
    p[::17] = np.nan
    metrics = measured(is_viral, p)
    scored = ~np.isnan(p)
    truth, score = is_viral[scored], p[scored]
    assert (metrics.count, metrics.scored, metrics.viral) == (500, scored.sum(), truth.sum())
    assert metrics.auroc == pytest.approx(roc_auc_score(truth, score), abs=1e-6)
    assert metrics.auprc == pytest.approx(average_precision_score(truth, score), abs=1e-6)
    assert metrics.f1 == pytest.approx(f1_score(truth, score >= 0.5), abs=1e-6)
    assert metrics.accuracy == pytest.approx(accuracy_score(truth, score >= 0.5), abs=1e-6)
    assert metrics.confusion.viral_called_virus == (truth & (score >= 0.5)).sum()
    assert metrics.confusion.viral_called_other == (truth & (score < 0.5)).sum()


def test_by_hand() -> None:
    metrics = measured(
        [True, True, True, False, False], [0.95, 0.85, 0.15, 0.15, np.nan], [900, 5000, 5000, 900, 900]
    )
    assert metrics.precision == 1.0
    assert metrics.recall == pytest.approx(2 / 3, abs=1e-6)
    # 0.95 and 0.85 are all viral; of the two at 0.15 one is.
    assert metrics.ece == pytest.approx((0.05 + 0.15 + 2 * 0.35) / 4, abs=1e-6)
    by_class = [(one.name, one.count, one.scored, one.called_virus) for one in metrics.by_class]
    assert by_class == [("viral", 3, 3, 2), ("other", 2, 1, 0)]
    short, long = metrics.by_length
    assert (short.shortest, short.longest, short.count, short.scored, short.auroc) == (0, 999, 3, 2, 1.0)
    assert (long.shortest, long.longest, long.auroc, long.accuracy) == (3000, 9999, None, 0.5)
    assert sum(one.count for one in metrics.reliability) == 4
    assert metrics.reliability[1].mean_p == pytest.approx(0.15)
    assert metrics.reliability[1].share_viral == 0.5


@pytest.mark.parametrize(
    ("is_viral", "p"), [([], []), ([True], [0.9]), ([False], [0.2]), ([True, False], [np.nan] * 2)]
)
def test_undefined_metrics_are_none(is_viral: list[bool], p: list[float]) -> None:
    metrics = measured(is_viral, p)
    assert metrics.auroc is metrics.ece_balanced is None
    assert metrics.count == len(p)


def test_balanced_error_does_not_depend_on_the_share_of_viruses() -> None:
    rng = np.random.default_rng(1)
    p = 1 / (1 + np.exp(-rng.normal(0, 2, 40_000)))
    is_viral = rng.random(40_000) >= p
    kept = ~is_viral | (rng.random(40_000) < 0.1)
    rare = measured(is_viral[kept], 1 - p[kept])
    assert rare.ece_balanced < 0.02 < rare.ece  # type: ignore[operator]


def test_the_last_bin_holds_one() -> None:
    assert calibration_error(np.array([1.0]), np.array([True]), np.ones(1)) == 0.0
    assert calibration_error(np.array([0.0, 1.0]), np.array([True, False]), np.ones(2)) == 1.0
