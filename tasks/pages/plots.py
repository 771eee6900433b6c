"""Plots of metrics, drawn without a display and without pyplot's global state."""

from pathlib import Path
from typing import TYPE_CHECKING

from virnuc_core.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from virnuc_core.training.metrics import KnownCalls, Metrics


def _new_figure(title: str, x_label: str, y_label: str) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure  # takes a second; not every process plots

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", pad=18)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4)
    axes.set_axisbelow(True)
    return figure, axes


def roc_figure(levels: "dict[str, KnownCalls]") -> "Figure":
    """ROC curve, one line per level; levels with one class have none."""
    from sklearn.metrics import roc_auc_score, roc_curve

    figure, axes = _new_figure("ROC curve", "false positive rate", "true positive rate")
    for name, calls in levels.items():
        scored = calls.take(calls.is_scored)
        if scored.is_viral.any() and not scored.is_viral.all():
            false_positives, found, _ = roc_curve(scored.is_viral, scored.p_virus)
            area = roc_auc_score(scored.is_viral, scored.p_virus)
            axes.plot(false_positives, found, label=f"{name}: AUROC {area:.3f}")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="chance")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def reliability_figure(levels: "dict[str, Metrics]") -> "Figure":
    """Reliability diagram: share of viruses over the score, one line per level; the diagonal is perfect calibration."""
    figure, axes = _new_figure("Calibration", "mean virus score", "observed fraction of viruses")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="perfect calibration")
    for name, figures in levels.items():
        points = [
            (one.mean_p, one.share_viral)
            for one in figures.reliability
            if one.mean_p is not None and one.share_viral is not None
        ]
        if points:
            error = "" if figures.ece is None else f", ECE {figures.ece:.3f}"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{name}{error}")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def save_png(figure: "Figure", path: Path) -> None:
    """Writes a plot deterministically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
