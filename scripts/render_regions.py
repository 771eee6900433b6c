"""Draws docs/images/regions.png from benchmarks/results/regions.json.

    python -m scripts.render_regions

Above, base-level precision, recall and F1 by length of the pasted segment; below, contigs with their chunk scores, the
place of the segment and the regions that were called.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT: Final = Path(__file__).parents[1]
_INK, _VIRAL, _CALLED = "#3b4252", "#f3d9b1", "#b0413e"
_BARS: Final = {"precision": "#9fb4c7", "recall": "#5f86a8", "f1": "#274c6b"}
_WANTED_F1: Final = 0.8


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws all of it.

    Args:
        results: the content of regions.json.
        path: the picture.
    """
    mpl.rcParams.update(
        {"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK, "svg.hashsalt": "regions"}
    )
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


def _draw_figures(axis: Axes, results: dict[str, Any]) -> None:
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


def _draw_track(axis: Axes, track: dict[str, Any]) -> None:
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


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "regions.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "regions.png")
    arguments = parser.parse_args(argv)
    mpl.use("agg")
    draw(json.loads(arguments.results.read_text()), arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
