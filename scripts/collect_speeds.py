"""Puts the speeds that `virnuc models list` shows together from benchmarks/results; no figure is written by hand.

    python -m scripts.collect_speeds [--check]

Forward passes over sequences of one length (166 residues, 500 bases), one device, the first result of each model,
precision and device by name of its file. With --check nothing is written, and the exit code says whether the file is
what the results give.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from virnuc_core.inference.model_facts import MeasuredSpeed

ROOT: Final = Path(__file__).parents[1]
OUT: Final = ROOT / "virnuc_core" / "inference" / "speeds.json"
LENGTHS: Final = {"esm2": 166, "dnabert_s": 500}
_THREE_DIGITS: Final = 3


def collect(results: Path) -> list[MeasuredSpeed]:
    """The figures, one for each model, precision and machine."""
    found: dict[tuple[str, ...], MeasuredSpeed] = {}
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text())
        for speed in (*_gpu_speeds(path.stem, document), *_cpu_speeds(path.stem, document)):
            found.setdefault((speed.family, speed.name, speed.precision, speed.machine), speed)
    return sorted(
        found.values(), key=lambda speed: (speed.family, speed.name, speed.precision, speed.machine)
    )


def _gpu_speeds(result: str, document: dict[str, Any]) -> Iterator[MeasuredSpeed]:
    if document.get("kind") != "bench":
        return
    for case in document["cases"]:
        length = LENGTHS[case["family"]]
        if case["lengths"] == f"fixed:{length}" and case["model"].startswith("random:"):
            yield MeasuredSpeed(
                family=case["family"],
                name=case["model"].removeprefix("random:"),
                precision=case["precision"],
                machine=document["machine"]["device"],
                letters_per_second=_rounded(case["forward"]["letters_per_second"]),
                letters=length,
                result=result,
                command=document["command"],
            )


def _cpu_speeds(result: str, document: dict[str, Any]) -> Iterator[MeasuredSpeed]:
    model = re.fullmatch(r"ESM-2 (\w+), random weights", str(document.get("model")))
    speeds = document.get("residues_per_second", {})
    if model and "virnuc fp32, budget 2048" in speeds:
        yield MeasuredSpeed(
            family="esm2",
            name=model[1],
            precision="fp32",
            machine=f"{document['cpu']}, {document['threads']} threads",
            letters_per_second=_rounded(speeds["virnuc fp32, budget 2048"]["median"]),
            letters=document["length"],
            result=result,
            command=document["command"],
        )


def _rounded(value: float) -> int:
    """To three digits, which is what a figure from another machine is worth."""
    return int(round(value, _THREE_DIGITS - len(str(int(value)))))


def main(argv: list[str] | None = None) -> int:
    """Writes the file, or checks it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    text = json.dumps([asdict(speed) for speed in collect(arguments.results)], indent=1) + "\n"
    if arguments.check:
        if text != arguments.out.read_text():
            print(f"{arguments.out.name} is not what the results give: run python -m scripts.collect_speeds")
            return 1
        return 0
    arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
