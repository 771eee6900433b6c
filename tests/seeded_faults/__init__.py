"""Faults to seed into the product, each with the tests that must detect it.

They are data, in `faults.toml`: when the code of a fault moves or changes, update its `file`, `old` and `new`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement in one file: `old` is in it exactly once, and the pytest nodes `tests` must fail."""

    id: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def missing(self) -> str:
        """What of it is not there: its file, its text in that file, a file or a function of its tests; "" if it is whole."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} is not there"
        try:
            self.applied(path.read_text(encoding="utf-8"))
        except ValueError as error:
            return str(error)
        for node in self.tests:
            file, _, name = node.partition("::")
            function = f"def {name.partition('[')[0]}("
            if not (ROOT / file).is_file() or (
                name and function not in (ROOT / file).read_text(encoding="utf-8")
            ):
                return f"its test {node} is not there"
        return "" if self.tests else "it has no tests"

    def applied(self, source: str) -> str:
        """The source with the fault in it.

        Raises:
            ValueError: `old` is not in it exactly once.
        """
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"its text is {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def read_faults() -> tuple[Fault, ...]:
    """All faults, in file order."""
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in tomllib.loads(text)["fault"])
