"""Faults to seed into the product, each with the tests that must detect it.

They are data, in `faults.toml`: when the code of a fault moves or changes, update its `file`, `old` and `new`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS_FILE = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement in one file.

    Attributes:
        what: the resulting error, in one sentence.
        file: relative to the root of the repository.
        old: text that is in the file exactly once.
        tests: pytest node ids that must fail.
    """

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


def read_faults(path: Path = FAULTS_FILE) -> tuple[Fault, ...]:
    """All faults, in file order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)
