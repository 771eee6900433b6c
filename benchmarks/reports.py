"""Command line and report of a benchmark."""

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

RESULTS: Final = Path(__file__).parent / "results"
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "contigs.fa.gz"


def options_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with --out, by default NAME.json among the results, with dots as folders."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name.replace('.', '/')}.json")
    return parser


def command_of(name: str) -> str:
    """The command that repeats the measurement, with the names of files without their folders, and without --out."""
    given = sys.argv[1:]
    if "--out" in given:
        place = given.index("--out")
        given = given[:place] + given[place + 2 :]
    return shlex.join(["python", "-m", f"benchmarks.{name}", *(Path(word).name for word in given)])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a tab-separated table with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def print_and_write(report: Mapping[str, Any], path: Path) -> None:
    print(json.dumps(report, indent=1))
    write_report(report, path)
