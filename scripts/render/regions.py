"""Tables and figure of docs/regions.md: metrics by length of the pasted segment, tiers, and contigs with their scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from scripts.render.tables import Json, MakeTable, Results, table

_INK, _VIRAL, _CALLED = "#3b4252", "#f3d9b1", "#b0413e"
_BARS: Final = {"precision": "#9fb4c7", "recall": "#5f86a8", "f1": "#274c6b"}
_WANTED_F1: Final = 0.8
# With the default chunk length in windows and in shorter ones, and with chunks of 500 bp.
_FILES: Final = ("regions", "regions_short", "regions_500")


def method_rows(results: Results) -> Iterator[Json]:
    """The best and the median setting of each method on the held-out windows."""
    for name, method in results["regions_methods"]["methods"].items():
        setting, best = next(iter(method["best"].items()))
        yield {"method": name, **method, "best": best["f1"], "setting": setting}
        if "chosen" in method:
            model = " ".join(f"{key}={value:g}" for key, value in results["regions"]["model"].items())
            chosen = {"best": method["chosen"]["f1"], "median_f1": None, "setting": model}
            yield {"method": f"{name}, as chosen", "settings": 1, **chosen}


def figure_rows(results: Results) -> Iterator[Json]:
    """Precision, recall and F1 on the validation windows, by their length and that of chunk and segment."""
    for measured, result in _measured(results):
        for length, group in {"all": result, **result["by_length"]}.items():
            kind = "all" if length == "all" else f"{int(length):,} bp"
            yield {**group, **measured, "kind": kind}


def tier_rows(results: Results) -> Iterator[Json]:
    """How many bases of the regions of each tier are viral."""
    for measured, result in _measured(results):
        for tier, regions in result["by_tier"].items():
            yield {**regions, **measured, "tier": tier}


def _measured(results: Results) -> Iterator[tuple[dict[str, str], Json]]:
    """Results with their window and chunk lengths in words."""
    for result in (results[name] for name in _FILES if name in results):
        length, (least, most) = result["chunk_length"], result["windows"]
        chunks = "by length" if length == "auto" else f"{length} bp"
        yield {"windows": f"{least // 1000} to {most // 1000} kb", "chunks": chunks}, result


TABLES: Final[dict[str, MakeTable]] = {
    "methods": table(
        "method|settings|best F1|median F1|with",
        "{method}|{settings}|{best:.3f}|{median_f1:.3f}|{setting}",
        method_rows,
    ),
    "figures": table(
        "windows|chunks|segments|contigs|precision|recall|F1",
        "{windows}|{chunks}|{kind}|{contigs}|{precision:.3f}|{recall:.3f}|{f1:.3f}",
        figure_rows,
    ),
    "tiers": table(
        "windows|chunks|tier|regions|their bases that are viral",
        "{windows}|{chunks}|`{tier}`|{regions}|{precision:.1%}",
        tier_rows,
    ),
}


def draw(results: Json, path: Path) -> None:
    """Plots the content of regions.json."""
    mpl.use("agg")
    mpl.rcParams.update({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK})
    tracks = results["tracks"]
    heights = [2.4, *[1.0] * len(tracks)]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(8, 8.5), height_ratios=heights, layout="constrained", squeeze=True
    )
    _draw_figures(axes[0], results)
    for axis, track in zip(axes[1:], tracks, strict=True):
        _draw_track(axis, track)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("position in the contig, kb")
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _draw_figures(axis: Axes, results: Json) -> None:
    groups = {"all": results, **results["by_length"]}
    for place, (name, color) in enumerate(_BARS.items()):
        values = [group[name] for group in groups.values()]
        bars = axis.bar([x + 0.27 * (place - 1) for x in range(len(groups))], values, 0.25, color=color)
        axis.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8)
        bars.set_label(name.upper() if name == "f1" else name)
    axis.set_xticks(
        range(len(groups)), ["all", *(f"{int(length) // 1000} kb" for length in results["by_length"])]
    )
    axis.axhline(_WANTED_F1, color=_INK, linewidth=0.8, linestyle=":")
    axis.set_ylim(0, 1.12)
    axis.set_title(
        f"Viral segments pasted into {results['contigs']} bacterial windows: bases, by length of segment",
        fontsize=10,
    )
    axis.legend(ncols=3, loc="lower right", framealpha=1)


def _draw_track(axis: Axes, track: Json) -> None:
    begin, end = (place / 1000 for place in track["segment"])
    axis.axvspan(begin, end, color=_VIRAL, linewidth=0)
    axis.scatter([place / 1000 for place in track["middle"]], track["p_virus"], s=9, color=_INK)
    for left, right, _ in track["regions"]:
        ends = [left / 1000, right / 1000]
        axis.plot(ends, [1.08, 1.08], color=_CALLED, linewidth=4, solid_capstyle="butt")
    axis.set_xlim(0, track["length"] / 1000)
    axis.set_ylim(-0.05, 1.2)
    axis.set_yticks([0, 0.5, 1])
    axis.set_ylabel("p_virus")
    kind = f"{end - begin:.0f} kb segment" if end > begin else "no segment"
    axis.set_title(f"{track['contig']}, {kind} (shaded: pasted; red: called)", fontsize=8, loc="left")
