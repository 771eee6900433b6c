"""Metrics of calls, where the true class of every sequence is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from virnuc_core.columns import Bool, Float64, Int64

RELIABILITY_BINS: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCalls:
    """Calls of n chunks or contigs whose true class is known, arrays (n,).

    Attributes:
        p_virus: NaN where there is no score.
        classes: index into class_names, which may be finer than viral and other.
        lengths: bp of the record.
    """

    is_viral: Bool
    p_virus: Float64
    classes: Int64
    class_names: tuple[str, ...]
    lengths: Int64

    @property
    def is_scored(self) -> Bool:
        """Shape (n,)."""
        return ~np.isnan(self.p_virus)

    @property
    def is_called(self) -> Bool:
        """Whether the score is 0.5 or more, shape (n,)."""
        return self.p_virus >= 0.5

    def take(self, rows: Bool) -> "KnownCalls":
        """Selects rows by mask (n,)."""
        names = ("is_viral", "p_virus", "classes", "lengths")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """Scored sequences by class and call."""

    viral_called_virus: int
    viral_called_other: int
    other_called_virus: int
    other_called_other: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassMetrics:
    """Counts of one class."""

    name: str
    is_viral: bool
    count: int
    scored: int
    called_virus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMetrics:
    """Metrics of the sequences whose records have shortest to longest bp (None: unbounded)."""

    shortest: int
    longest: int | None
    count: int
    scored: int
    auroc: float | None
    accuracy: float | None
    confusion: Confusion


@dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityBin:
    """Scored sequences with low <= p_virus < high (1 is in the last bin); None for an empty bin."""

    low: float
    high: float
    count: int
    mean_p: float | None
    share_viral: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """All metrics of some calls; None where undefined, such as the AUROC of a single class.

    Attributes:
        scored: sequences with a score; all other metrics but `count` are of these.
        viral: viruses among the scored.
        auprc: average precision.
        ece: expected calibration error: mean distance of p_virus from the share of viruses, over the reliability bins.
        ece_balanced: class-balanced `ece`.
    """

    count: int
    scored: int
    viral: int
    auroc: float | None
    auprc: float | None
    f1: float | None
    precision: float | None
    recall: float | None
    accuracy: float | None
    ece: float | None
    ece_balanced: float | None
    confusion: Confusion
    by_class: tuple[ClassMetrics, ...]
    by_length: tuple[LengthMetrics, ...]
    reliability: tuple[ReliabilityBin, ...]


def measure(calls: KnownCalls) -> Metrics:
    """Computes all metrics."""
    scored = calls.take(calls.is_scored)
    is_viral, p_virus, auroc, confusion = scored.is_viral, scored.p_virus, _auroc(scored), _confusion(scored)
    found = confusion.viral_called_virus
    wrong = confusion.viral_called_other + confusion.other_called_virus
    equal = np.ones(len(is_viral))
    balanced = equal / np.where(is_viral, max(1, is_viral.sum()), max(1, (~is_viral).sum()))
    return Metrics(
        count=len(calls.is_viral),
        scored=len(is_viral),
        viral=int(is_viral.sum()),
        auroc=auroc,
        auprc=_rounded(average_precision_score(is_viral, p_virus)) if is_viral.any() else None,
        f1=_share(2 * found, 2 * found + wrong),
        precision=_share(found, found + confusion.other_called_virus),
        recall=_share(found, found + confusion.viral_called_other),
        accuracy=_share(len(is_viral) - wrong, len(is_viral)),
        ece=calibration_error(p_virus, is_viral, equal),
        ece_balanced=None if auroc is None else calibration_error(p_virus, is_viral, balanced),
        confusion=confusion,
        by_class=tuple(_by_class(calls)),
        by_length=tuple(_by_length(calls)),
        reliability=tuple(_reliability(scored)),
    )


def calibration_error(p_virus: Float64, is_viral: Bool, weights: Float64) -> float | None:
    """Expected calibration error of n weighted scores, over bins of equal width; None without scores."""
    if not len(p_virus):
        return None
    bins = _bins(p_virus)
    distances = np.bincount(bins, weights * (p_virus - is_viral), RELIABILITY_BINS)
    return _rounded(np.abs(distances).sum() / weights.sum())


def _confusion(scored: KnownCalls) -> Confusion:
    counts = np.bincount(2 * scored.is_viral + scored.is_called, minlength=4).tolist()
    return Confusion(
        viral_called_virus=counts[3],
        viral_called_other=counts[2],
        other_called_virus=counts[1],
        other_called_other=counts[0],
    )


def _by_class(calls: KnownCalls) -> Iterator[ClassMetrics]:
    for number in np.unique(calls.classes):
        own = calls.take(calls.classes == number)
        yield ClassMetrics(
            name=calls.class_names[number],
            is_viral=bool(own.is_viral[0]),
            count=len(own.is_viral),
            scored=int(own.is_scored.sum()),
            called_virus=int(own.is_called[own.is_scored].sum()),
        )


def _by_length(calls: KnownCalls) -> Iterator[LengthMetrics]:
    edges = (0, 1_000, 3_000, 10_000, 30_000, 100_000)
    bins = np.digitize(calls.lengths, edges[1:])
    for number in np.unique(bins):
        own = calls.take(bins == number)
        scored = own.take(own.is_scored)
        yield LengthMetrics(
            shortest=edges[number],
            longest=edges[number + 1] - 1 if number + 1 < len(edges) else None,
            count=len(own.is_viral),
            scored=len(scored.is_viral),
            auroc=_auroc(scored),
            accuracy=_share(int((scored.is_viral == scored.is_called).sum()), len(scored.is_viral)),
            confusion=_confusion(scored),
        )


def _reliability(scored: KnownCalls) -> Iterator[ReliabilityBin]:
    bins = _bins(scored.p_virus)
    for number in range(RELIABILITY_BINS):
        own = scored.take(bins == number)
        count = len(own.p_virus)
        yield ReliabilityBin(
            low=number / RELIABILITY_BINS,
            high=(number + 1) / RELIABILITY_BINS,
            count=count,
            mean_p=_rounded(own.p_virus.mean()) if count else None,
            share_viral=_share(int(own.is_viral.sum()), count),
        )


def _bins(p_virus: Float64) -> Int64:
    return np.minimum((p_virus * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)


def _auroc(scored: KnownCalls) -> float | None:
    if scored.is_viral.all() or not scored.is_viral.any():
        return None
    return _rounded(roc_auc_score(scored.is_viral, scored.p_virus))


def _share(part: int, whole: int) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float) -> float:
    """Six decimals, so that files do not depend on the order of floating-point sums."""
    return round(float(value), 6)
