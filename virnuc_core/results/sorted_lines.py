"""Sorting more lines than fit in memory: sorted pieces on disk, merged when read."""

import heapq
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

SORTING_PREFIX: Final = ".sort-"
_LINES_AT_ONCE: Final = 1 << 20


class SortedLines:
    """Collects lines and gives them back ordered by their first column, by code points.

    Use it in a `with` block; it keeps its pieces in a folder of its own until then.
    """

    def __init__(self, folder: Path, lines_at_once: int = _LINES_AT_ONCE) -> None:
        """Prepares to sort.

        Args:
            folder: where the folder of pieces is made.
            lines_at_once: most lines held in memory.
        """
        self._temporary = tempfile.TemporaryDirectory(prefix=SORTING_PREFIX, dir=folder)
        self._lines_at_once = lines_at_once
        self._lines: list[bytes] = []
        self._pieces: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def extend(self, lines: Iterable[str]) -> None:
        """Adds lines, each with its line end."""
        for line in lines:
            self._lines.append(line.encode())
            if len(self._lines) >= self._lines_at_once:
                self._spill()

    def __iter__(self) -> Iterator[str]:
        self._lines.sort(key=_first_column)
        with ExitStack() as stack:
            pieces = [stack.enter_context(piece.open("rb")) for piece in self._pieces]
            for line in heapq.merge(*pieces, self._lines, key=_first_column):
                yield line.decode()

    def _spill(self) -> None:
        self._lines.sort(key=_first_column)
        piece = Path(self._temporary.name) / str(len(self._pieces))
        with piece.open("wb") as file:
            file.writelines(self._lines)
        self._pieces.append(piece)
        self._lines.clear()


def _first_column(line: bytes) -> bytes:
    """UTF-8 bytes sort as the code points do."""
    return line.partition(b"\t")[0]
