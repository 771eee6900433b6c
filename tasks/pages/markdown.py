"""Markdown for Prefect and MLflow pages; names from input files are escaped."""

import html
from collections.abc import Iterable, Sequence

from virnuc_core.inference.plan import PlannedModel
from virnuc_core.plain_text import visible
from virnuc_core.specs import FAMILY_NAMES


def cell(value: object) -> str:
    """Text with all markup escaped."""
    escaped = html.escape(_line(value), quote=False)
    for letter in "\\`*_[]|":
        escaped = escaped.replace(letter, f"\\{letter}")
    return escaped


def code(value: object) -> str:
    """A path or number to copy."""
    return f"`{_line(value).replace('`', chr(0x2019))}`"


def model_name(model: PlannedModel) -> str:
    return f"{FAMILY_NAMES[model.family]} {cell(model.name)}"


def number(value: float | None) -> str:
    """A count, a metric with three decimals, or a placeholder for a missing value."""
    if value is None:
        return "n/a"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with formatted cells; all columns but the first are right-aligned."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def size(num_bytes: int) -> str:
    """A number of bytes in a suitable unit."""
    amount, units = num_bytes / 1000, ["kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}" if amount < 1000 else f"{amount:,.0f} {units[0]}"


def _line(value: object) -> str:
    """One line with control characters made visible."""
    return visible(" ".join(str(value).split()))
