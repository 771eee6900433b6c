"""A run as a row of MultiQC's report: custom content, which MultiQC recognises by the file name and shows without a plugin."""

import json
from collections.abc import Mapping
from typing import Any, Final

from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FAMILY_NAMES

_PERCENT: Final[dict[str, str | float]] = {"suffix": "%", "max": 100, "format": "{:,.1f}"}


def _column(title: str, description: str, scale: str, **options: str | float) -> dict[str, str | float]:
    """Options of a column of numbers from 0 on, by default without decimals; `scale` names its colours."""
    own = {"title": title, "description": description, "scale": scale}
    return {**own, "min": 0, "format": "{:,.0f}", **options}


_COLUMNS: Final[dict[str, dict[str, str | float]]] = {
    "contigs_virus": _column("Virus", "Viral contigs", "Oranges", shared_key="contigs"),
    "contigs_provirus": _column("Provirus", "Contigs with a provirus", "Reds", shared_key="contigs"),
    "contigs_nonviral": _column("Non-viral", "Non-viral contigs", "Blues", shared_key="contigs"),
    "contigs_unscored": _column("Unscored", "Contigs without a score", "Greys", shared_key="contigs"),
    "scored": _column("Scored", "Percentage of chunks with a score", "Greens", **_PERCENT),
    "throughput": _column("Frames/s", "Frames embedded per second, excluding model loading", "Purples"),
    **{
        family: _column(
            f"{name} packing",
            f"Packing efficiency of {name}: tokens over batch capacity",
            "Greens",
            **_PERCENT,
        )
        for family, name in FAMILY_NAMES.items()
    },
}
_SECTION: Final = {
    "id": "virnuc",
    "section_name": "virnuc",
    "description": "identifies viral sequences in assemblies with protein and DNA language models.",
    "plot_type": "table",
    "pconfig": {"id": "virnuc_runs", "title": "virnuc: calls and speed", "namespace": "virnuc"},
    "headers": _COLUMNS,
}


def write_multiqc(folder: RunFolder, document: Mapping[str, Any]) -> None:
    """Writes virnuc_mqc.json from the content of a predict run's run.json, atomically; the sample is named after the folder.

    The throughput is left out if no shard was computed.
    """
    counts, speed = document["counts"], document["throughput"]["sequences_per_second"]
    row = {name: counts[name] for name in _COLUMNS if name in counts}
    row["scored"] = _percent(counts["scored_chunks"] / counts["chunks"])
    row |= {"throughput": speed} if speed else {}
    row |= {family: _percent(share) for family, share in document["packing_efficiency"].items()}
    content = {**_SECTION, "data": {visible(folder.root.resolve().name): row}}
    write_text(folder.multiqc, json.dumps(content, indent=1) + "\n")


def _percent(share: float) -> float:
    return round(100 * share, 2)
