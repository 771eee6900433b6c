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

    def applied(self, source: str) -> str:
        """The source with the fault in it.

        Raises:
            ValueError: `old` is not in it exactly once.
        """
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its text is {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def read_faults() -> tuple[Fault, ...]:
    """All faults, in file order."""
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in tomllib.loads(text)["fault"])
