"""The speeds that `virnuc models list` shows, from the result files.

Forward passes over sequences of one length (166 residues, 500 bases) on one device; per model, precision and device the
first result by file name.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from scripts.render.tables import Json, Results
from virnuc_core.inference.model_facts import MeasuredSpeed

_LENGTHS: Final = {"esm2": 166, "dnabert_s": 500}


def render(results: Results) -> str:
    """The content of speeds.json."""
    found: dict[tuple[str, ...], MeasuredSpeed] = {}
    for name, document in results.items():
        for speed in _speeds(document):
            # Three digits: the precision that a number from another machine deserves.
            rate = speed["letters_per_second"]
            speed["letters_per_second"] = int(round(rate, 3 - len(str(int(rate)))))
            measured = MeasuredSpeed(**speed, result=name, command=document["command"])
            found.setdefault((measured.family, measured.name, measured.precision, measured.machine), measured)
    return json.dumps([asdict(speed) for _, speed in sorted(found.items())], indent=1) + "\n"


def _speeds(document: Json) -> Iterator[Json]:
    """The speeds in one result file, of virnuc's own benchmark or of `benchmarks.cpu_speed`."""
    for case in document["cases"] if document.get("kind") == "bench" else ():
        length = _LENGTHS[case["family"]]
        if case["lengths"] == f"fixed:{length}" and case["model"].startswith("random:"):
            yield {
                "family": case["family"],
                "name": case["model"].removeprefix("random:"),
                "precision": case["precision"],
                "machine": document["machine"]["device"],
                "letters_per_second": case["forward"]["letters_per_second"],
                "letters": length,
            }
    model = re.fullmatch(r"ESM-2 (\w+), random weights", str(document.get("model")))
    speeds = document.get("residues_per_second", {})
    if model and "virnuc fp32, budget 2048" in speeds:
        yield {
            "family": "esm2",
            "name": model[1],
            "precision": "fp32",
            "machine": f"{document['cpu']}, {document['threads']} threads",
            "letters_per_second": speeds["virnuc fp32, budget 2048"]["median"],
            "letters": document["length"],
        }
