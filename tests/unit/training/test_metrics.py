import numpy as np
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score

from virnuc_core.training.metrics import KnownCalls, calibration_error, measure


def known(is_viral: list[bool], p_virus: list[float], lengths: list[int] | None = None) -> KnownCalls:
    p = np.array(p_virus, float)
    viral = np.array(is_viral, bool)
    return KnownCalls(
        is_viral=viral,
        is_called=p >= 0.5,
        p_virus=p,
        classes=np.where(viral, 0, 1),
        class_names=("viral", "other"),
        lengths=np.array(lengths or [500] * len(p)),
    )


def test_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    is_viral = rng.random(500) < 0.3
    p = np.clip(rng.normal(0.4 + 0.2 * is_viral, 0.2), 0, 1)
    p[::17] = np.nan
    metrics = measure(known(is_viral.tolist(), p.tolist()))
    scored = ~np.isnan(p)
    truth, score = is_viral[scored], p[scored]
    assert metrics.count == 500
    assert metrics.scored == scored.sum()
    assert metrics.viral == truth.sum()
    assert metrics.auroc == pytest.approx(roc_auc_score(truth, score), abs=1e-6)
    assert metrics.auprc == pytest.approx(average_precision_score(truth, score), abs=1e-6)
    assert metrics.f1 == pytest.approx(f1_score(truth, score >= 0.5), abs=1e-6)
    assert metrics.accuracy == pytest.approx(accuracy_score(truth, score >= 0.5), abs=1e-6)
    confusion = metrics.confusion
    assert confusion.viral_called_virus == (truth & (score >= 0.5)).sum()
    assert confusion.viral_called_virus + confusion.viral_called_other == truth.sum()


def test_by_hand() -> None:
    metrics = measure(
        known(
            [True, True, True, False, False],
            [0.95, 0.85, 0.15, 0.15, float("nan")],
            [900, 5000, 5000, 900, 900],
        )
    )
    assert metrics.precision == 1.0
    assert metrics.recall == pytest.approx(2 / 3, abs=1e-6)
    # 0.95 and 0.85 are all viral; of the two at 0.15 one is.
    assert metrics.ece == pytest.approx((0.05 + 0.15 + 2 * 0.35) / 4, abs=1e-6)
    assert [(one.name, one.count, one.scored, one.called_virus) for one in metrics.by_class] == [
        ("viral", 3, 3, 2),
        ("other", 2, 1, 0),
    ]
    short, long = metrics.by_length
    assert (short.shortest, short.longest, short.count, short.scored, short.auroc) == (0, 999, 3, 2, 1.0)
    assert (long.shortest, long.longest, long.auroc, long.accuracy) == (3000, 9999, None, 0.5)
    assert sum(one.count for one in metrics.reliability) == 4
    assert metrics.reliability[1].mean_p == pytest.approx(0.15)
    assert metrics.reliability[1].share_viral == 0.5


@pytest.mark.parametrize(
    ("is_viral", "p"), [([], []), ([True], [0.9]), ([False], [0.2]), ([True, False], [float("nan")] * 2)]
)
def test_undefined_metrics_are_none(is_viral: list[bool], p: list[float]) -> None:
    metrics = measure(known(is_viral, p))
    assert metrics.auroc is None
    assert metrics.ece_balanced is None
    assert "auroc" not in metrics.numbers
    assert metrics.numbers["count"] == len(p)


def test_balanced_error_does_not_depend_on_the_share_of_viruses() -> None:
    rng = np.random.default_rng(1)
    margins = rng.normal(0, 2, 40_000)
    p = 1 / (1 + np.exp(-margins))
    is_viral = rng.random(40_000) < p
    kept = is_viral | (rng.random(40_000) < 0.1)
    rare = measure(known((~is_viral[kept]).tolist(), (1 - p[kept]).tolist()))
    assert rare.ece is not None
    assert rare.ece_balanced is not None
    assert rare.ece_balanced < 0.02 < rare.ece


def test_the_last_bin_holds_one() -> None:
    assert calibration_error(np.array([1.0]), np.array([True]), np.ones(1)) == 0.0
    assert calibration_error(np.array([0.0, 1.0]), np.array([True, False]), np.ones(2)) == 1.0
