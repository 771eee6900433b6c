"""Markdown tables from result files, and their places in a page.

A table is placed between `<!-- NAME -->` and `<!-- /NAME -->`. Its cells are format strings over a row, with Python's
formats and those of `FORMATS`; None gives an empty cell.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"

Json = dict[str, Any]
Results = Mapping[str, Json]
Rows = Iterable[Mapping[str, Any]]
MakeTable = Callable[[Results], str]

FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "plain": lambda model: model.rpartition(":")[2],  # without family and `random:`
    "count": lambda value: f"{round(value, -max(0, len(str(int(value))) - 4)):,.0f}",  # to four digits
    "GB": lambda size: f"{size / 1e9:.1f}",
    "percent": lambda share: f"{100 * share:.1f}%",
    "share": lambda share: f"{100 * share:.3f}%",
    # Rounded down: a cosine that is not 1 must not read as 1.
    "cosine": lambda value: f"{math.floor(value * 1e7) / 1e7:.7f}",
    "spread": lambda repeats: f"{100 * (max(repeats) - min(repeats)) / statistics.median(repeats):.1f}%",
    "each": lambda values: " ".join(f"{value:.1f}" for value in values),
}


class _Cells(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        return FORMATS[format_spec](value) if format_spec in FORMATS else format(value, format_spec)


_CELLS: Final = _Cells()


@cache
def load_results() -> Results:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def table(header: str, cells: str, rows: Callable[[Results], Rows]) -> MakeTable:
    def make(results: Results) -> str:
        made = [[_CELLS.vformat(cell, (), row) for cell in cells.split("|")] for row in rows(results)]
        return markdown(header, made)

    return make


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A table; columns of the header are separated by `|`."""
    columns = header.split("|")
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def fill(page: str, tables: Mapping[str, MakeTable], results: Results) -> str:
    """The page with its tables filled in.

    Raises:
        ValueError: it has no place for a table.
    """
    for name, make in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if (match := place.search(page)) is None:
            raise ValueError(f"the page has no place for the table {name!r}")
        page = f"{page[: match.end(1)]}\n{make(results)}\n\n{page[match.start(2) :]}"
    return page
