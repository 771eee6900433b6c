"""Markdown for the pages of Prefect and MLflow; names quoted from foreign files are shown as they are."""

import html
from collections.abc import Iterable, Mapping, Sequence

from virnuc_core.plain_text import visible


def cell(value: object) -> str:
    """Text in which nothing is taken for markup."""
    escaped = html.escape(_line(value), quote=False)
    for letter in "\\`*_[]|":
        escaped = escaped.replace(letter, f"\\{letter}")
    return escaped


def code(value: object) -> str:
    """A path or a number to copy."""
    return f"`{_line(value).replace('`', chr(0x2019))}`"


def link(target: str) -> str:
    """A link where a browser can follow it, else the text to copy."""
    return f"[{target}]({target})" if target.startswith(("http://", "https://")) else code(target)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose cells are ready; all columns but the first are set to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(line)} |" for line in (header, rule, *rows)]


def links_of(links: Mapping[str, str]) -> list[str]:
    """A list of named links."""
    return [f"- {name.replace('_', ' ')}: {link(target)}" for name, target in links.items()]


def size(num_bytes: int) -> str:
    """An amount of bytes in the unit that suits it."""
    amount, units = num_bytes / 1000, ["kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}" if amount < 1000 else f"{amount:,.0f} {units[0]}"


def _line(value: object) -> str:
    """One line in which every character can be seen."""
    return visible(" ".join(str(value).split()))
