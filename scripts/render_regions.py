"""Draws docs/images/regions.png and fills the tables of docs/regions.md, from benchmarks/results/regions*.json.

    python -m scripts.render_regions [--check]

In the picture, above: base-level precision, recall and F1 by length of the pasted segment; below: contigs with their chunk
scores, the place of the segment and the regions that were called (scripts/result_pages.py fills the tables).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from scripts.result_pages import RESULTS, ROOT, Json, ResultPage, markdown

Results = dict[str, Json]
_INK, _VIRAL, _CALLED = "#3b4252", "#f3d9b1", "#b0413e"
_BARS: Final = {"precision": "#9fb4c7", "recall": "#5f86a8", "f1": "#274c6b"}
_WANTED_F1: Final = 0.8


def draw(results: Json, path: Path) -> None:
    """Draws all of it.

    Args:
        results: the content of regions.json.
        path: the picture.
    """
    mpl.rcParams.update({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK})
    tracks = results["tracks"]
    heights = [2.4, *[1.0] * len(tracks)]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(8, 8.5), height_ratios=heights, layout="constrained", squeeze=True
    )
    _draw_figures(axes[0], results)
    for axis, track in zip(axes[1:], tracks, strict=True):
        _draw_track(axis, track)
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
    labels = ["all", *(f"{int(length) // 1000} kb" for length in results["by_length"])]
    axis.set_xticks(range(len(groups)), labels)
    axis.axhline(_WANTED_F1, color=_INK, linewidth=0.8, linestyle=":")
    axis.set_ylim(0, 1.12)
    axis.set_title(
        f"Viral segments pasted into {results['contigs']} bacterial windows, {results['chunk_length']} bp chunks:"
        " bases, by length of segment",
        fontsize=10,
    )
    axis.legend(ncols=3, loc="lower right", framealpha=1)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_track(axis: Axes, track: Json) -> None:
    begin, end = (place / 1000 for place in track["segment"])
    axis.axvspan(begin, end, color=_VIRAL, linewidth=0)
    axis.scatter([place / 1000 for place in track["middle"]], track["p_virus"], s=9, color=_INK)
    for left, right, _ in track["regions"]:
        axis.plot(
            [left / 1000, right / 1000], [1.08, 1.08], color=_CALLED, linewidth=4, solid_capstyle="butt"
        )
    axis.set_xlim(0, track["length"] / 1000)
    axis.set_ylim(-0.05, 1.2)
    axis.set_yticks([0, 0.5, 1])
    axis.set_ylabel("p_virus")
    kind = f"{end - begin:.0f} kb segment" if end > begin else "no segment"
    axis.set_title(f"{track['contig']}, {kind} (shaded: pasted; red: called)", fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def methods_table(results: Results) -> str:
    """The best and the median setting of each method on the training windows."""
    rows = []
    for name, method in results["regions_methods"]["methods"].items():
        setting, best = next(iter(method["best"].items()))
        rows.append(
            (name, str(method["settings"]), f"{best['f1']:.3f}", f"{method['median_f1']:.3f}", setting)
        )
        if "chosen" in method:
            model = " ".join(f"{key}={value:g}" for key, value in results["regions"]["model"].items())
            rows.append((f"{name}, as chosen", "1", f"{method['chosen']['f1']:.3f}", "", model))
    return markdown("method|settings|best F1|median F1|with", rows)


def figures_table(results: Results) -> str:
    """Precision, recall and F1 on the validation windows, by length of chunk and segment."""
    rows = []
    for result in (results["regions"], results["regions_300"]):
        for length, group in {"all": result, **result["by_length"]}.items():
            kind = "all" if length == "all" else f"{int(length):,} bp"
            shares = (f"{group[figure]:.3f}" for figure in ("precision", "recall", "f1"))
            rows.append((f"{result['chunk_length']} bp", kind, str(group["contigs"]), *shares))
    return markdown("chunks|segments|contigs|precision|recall|F1", rows)


def tiers_table(results: Results) -> str:
    """How often calls of each tier are right."""
    rows = []
    for result in (results["regions"], results["regions_300"]):
        for tier, regions in result["by_tier"].items():
            contigs = result["contig_tiers"][tier]
            right = f"{contigs['right'] / contigs['contigs']:.1%}"
            names = (f"{result['chunk_length']} bp", f"`{tier}`")
            counts = (str(contigs["contigs"]), right, str(regions["regions"]), f"{regions['precision']:.1%}")
            rows.append((*names, *counts))
    return markdown("chunks|tier|records|called right|regions|their bases that are viral", rows)


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "methods": methods_table,
    "figures": figures_table,
    "tiers": tiers_table,
}


def read_results(folder: Path) -> Results:
    """All files, by name."""
    names = ("regions", "regions_300", "regions_methods")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


PAGE: Final = ResultPage(
    path=ROOT / "docs" / "regions.md",
    script="scripts.render_regions",
    results=RESULTS,
    read=read_results,
    tables=TABLES,
)


def main(argv: list[str] | None = None) -> int:
    """Fills the page, or checks it; a page that is filled gets its picture, too."""
    code = PAGE.main(argv)
    arguments = PAGE.arguments(argv)
    if not arguments.check:
        mpl.use("agg")
        draw(read_results(arguments.results)["regions"], arguments.page.parent / "images" / "regions.png")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
