"""Plots of runs and metrics, drawn without a display and without pyplot's global state."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.parquet as pq

from virnuc_core.files import atomic_path
from virnuc_core.inference.events import LaneStarted, ShardDone
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.results.run_json import speeds
from virnuc_core.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from virnuc_core.training.metrics import KnownCalls, Metrics

# Seconds (Unix time) and value.
Curve = Sequence[tuple[float, float]]

_VIRUS_COLOUR: Final = "#c8553d"
_OTHER_COLOUR: Final = "#588b8b"


def score_figure(counts: Sequence[int]) -> "Figure":
    """Histogram of the scores of chunks, from counts in equal bins of 0..1."""
    edges, found = np.linspace(0.0, 1.0, len(counts) + 1)[:-1], np.array(counts)
    figure, axes = new_figure("Scores of chunks", "virus_score of a chunk", "chunks")
    is_virus = edges >= 0.5 - 1e-9
    colours = np.where(is_virus, _VIRUS_COLOUR, _OTHER_COLOUR).tolist()
    axes.bar(
        edges, found, width=1 / len(counts), align="edge", color=colours, edgecolor="white", linewidth=0.4
    )
    axes.set_xlim(0, 1)
    return figure


def throughput_figure(lanes: Sequence[tuple[str, Curve]]) -> "Figure":
    """Sequences per second over time, one line per lane; many lanes have no legend."""
    moments = [moment for _, curve in lanes for moment, _ in curve]
    begin, end = min(moments, default=0.0), max(moments, default=0.0)
    unit, seconds = ("minutes", 60) if end - begin >= 180.0 else ("seconds", 1)
    figure, axes = new_figure("Throughput of the lanes", unit, "sequences/s")
    is_named = len(lanes) <= 10
    style = {"marker": "o", "markersize": 3} if is_named else {"linewidth": 0.6, "alpha": 0.6}
    for name, curve in lanes:
        times = [(moment - begin) / seconds for moment, _ in curve]
        axes.plot(times, [value for _, value in curve], label=name, **style)
    axes.set_ylim(bottom=0)
    if is_named and lanes:
        axes.legend(frameon=False, fontsize="small")
    return figure


def run_figures(folder: RunFolder) -> "Iterator[tuple[str, Figure]]":
    """Figures of a finished run, by name."""
    if folder.chunks_parquet.exists():
        edges = np.linspace(0.0, 1.0, 51)
        counts = np.zeros(len(edges) - 1, np.int64)
        with pq.ParquetFile(folder.chunks_parquet) as chunks:
            for batch in chunks.iter_batches(columns=["virus_score"]):
                counts += np.histogram(batch["virus_score"].drop_null().to_numpy(), edges)[0]
        yield "virus_score", score_figure(counts.tolist())
    journals = [
        path for path in sorted(folder.lanes.glob("lane-*.jsonl")) if path.is_file() and not path.is_symlink()
    ]
    curves = dict(filter(None, map(_speeds_of_lane, journals)))
    if any(len(curve) > 1 for curve in curves.values()):
        yield "throughput", throughput_figure(list(curves.items()))


def _speeds_of_lane(journal: Path) -> tuple[str, Curve] | None:
    """A lane's name, and the speed of each shard of its last process."""
    events = JournalTail(journal).read_new()
    starts = [place for place, event in enumerate(events) if isinstance(event, LaneStarted)]
    if not starts:
        return None
    last = events[starts[-1]]
    assert isinstance(last, LaneStarted)
    curve = [
        (event.time, speeds(event.counters, event.seconds.forward)["sequences_per_second"])
        for event in events[starts[-1] :]
        if isinstance(event, ShardDone)
    ]
    return f"lane {last.lane} on {last.place}", curve


def new_figure(title: str, x_label: str, y_label: str) -> tuple["Figure", "Axes"]:
    """An empty plot in the common style."""
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

    figure, axes = new_figure(
        "Viruses found and false positives", "others called virus", "viruses called virus"
    )
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
    """Writes a plot deterministically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
