"""A run as a row of MultiQC's report: custom content, which MultiQC recognises by the file name and shows without a plugin."""

import json
from collections.abc import Mapping
from typing import Any, Final

from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FAMILY_NAMES

_COUNT: Final = {"format": "{:,.0f}", "min": 0}
_PERCENT: Final = {"format": "{:,.1f}", "suffix": "%", "min": 0, "max": 100}
# Options of the columns, in display order.
_COLUMNS: Final[dict[str, dict[str, Any]]] = {
    "contigs_virus": {
        "title": "Virus",
        "description": "Contigs called virus",
        "scale": "Oranges",
        "shared_key": "virnuc_contigs",
        **_COUNT,
    },
    "contigs_other": {
        "title": "Other",
        "description": "Contigs called other",
        "scale": "Blues",
        "shared_key": "virnuc_contigs",
        **_COUNT,
    },
    "contigs_unscored": {
        "title": "Unscored",
        "description": "Contigs without a score",
        "scale": "Greys",
        "shared_key": "virnuc_contigs",
        **_COUNT,
    },
    "scored": {
        "title": "Scored",
        "description": "Chunks with a score, of all chunks",
        "scale": "Greens",
        **_PERCENT,
    },
    "throughput": {
        "title": "Frames/s",
        "description": "Frames embedded per second, loading of the models excluded",
        "scale": "Purples",
        **_COUNT,
    },
    **{
        family: {
            "title": f"{name} packing",
            "description": f"Tokens in the batches of {name}, of the tokens that they have room for",
            "scale": "Greens",
            **_PERCENT,
        }
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

    A run that computed no shard has no throughput.
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
