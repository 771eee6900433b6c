"""Aligned columns of text for a person."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ", numbers: Sequence[int] = ()) -> str:
    """Rows of cells below one another, two spaces between columns.

    Args:
        rows: of equal lengths; the first may be a heading.
        indent: before each line.
        numbers: columns that are flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
