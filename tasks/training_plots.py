"""Plots of how good calls are, as files."""

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.plots import new_figure
from virnuc_core.files import atomic_path
from virnuc_core.training.metrics import Figures, KnownCalls

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roc_figure(levels: dict[str, KnownCalls]) -> "Figure":
    """Share of viruses found over the share of false alarms, a line a level; levels of one class have none."""
    from sklearn.metrics import roc_auc_score, roc_curve

    figure, axes = new_figure("Viruses found and false alarms", "others called virus", "viruses called virus")
    for name, calls in levels.items():
        scored = calls.take(calls.is_scored)
        if scored.is_viral.any() and not scored.is_viral.all():
            alarms, found, _ = roc_curve(scored.is_viral, scored.p_virus)
            area = roc_auc_score(scored.is_viral, scored.p_virus)
            axes.plot(alarms, found, label=f"{name}: AUROC {area:.3f}")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="chance")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def reliability_figure(levels: dict[str, Figures]) -> "Figure":
    """Share of viruses over the score that they have, a line a level; on the diagonal, a score is a probability."""
    figure, axes = new_figure("Are scores probabilities?", "mean P(virus)", "share of viruses")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="a probability")
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
    """Writes a plot; equal plots are equal files."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
