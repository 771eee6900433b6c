"""Pages of docs/ whose tables are filled from result files; no figure is written by hand.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"

Json = dict[str, Any]
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultPage(Generic[R]):
    """A page and where its tables come from.

    Attributes:
        path: the page.
        script: the module that fills it, for the message that tells to run it.
        results: the folder of the result files.
        read: reads them.
        tables: makes each table from what was read, by name.
    """

    path: Path
    script: str
    results: Path
    read: Callable[[Path], R]
    tables: Mapping[str, Callable[[R], str]]

    def render(self, page: str, results: R) -> str:
        """The text of the page with its tables filled in.

        Raises:
            ValueError: it lacks the place of a table.
        """
        for name, make in self.tables.items():
            place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            if (match := place.search(page)) is None:
                raise ValueError(f"the page has no place for the table {name!r}")
            page = f"{page[: match.end(1)]}\n{make(results)}\n\n{page[match.start(2) :]}"
        return page

    def arguments(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """`check`, and the paths `page` and `results`."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.script}")
        parser.add_argument("--check", action="store_true")
        parser.add_argument("--page", type=Path, default=self.path)
        parser.add_argument("--results", type=Path, default=self.results)
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Writes the page; with --check nothing is written, and the exit code says whether it is what its source gives."""
        arguments = self.arguments(argv)
        page = arguments.page.read_text()
        rendered = self.render(page, self.read(arguments.results))
        if arguments.check and rendered != page:
            print(f"{arguments.page.name} is not what it is made from: run python -m {self.script}")
            return 1
        arguments.page.write_text(rendered)
        return 0


def markdown(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table; columns of the header are parted by `|`."""
    columns = header.split("|")
    lines = [f"| {' | '.join(row)} |" for row in (tuple(columns), *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def count(value: float | None) -> str:
    """A large number, to three or four digits."""
    if value is None:
        return ""
    return f"{round(value, -max(0, len(str(int(value))) - 4)):,.0f}"
