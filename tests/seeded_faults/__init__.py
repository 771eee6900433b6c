"""Faults to seed into the product, each with the tests that must find it.

They are data, in `faults.toml`: whoever moves or rewrites the code of a fault gives it its new `file`, `old` and `new`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS_FILE = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """One replacement in one file.

    Attributes:
        id: short name.
        what: what is wrong then, in one sentence.
        file: of the product, below the root of the repository.
        old: text that is in the file exactly once.
        new: what stands there instead.
        tests: node ids of pytest that must fail then.
    """

    id: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The text of the file with the fault in it.

        Raises:
            ValueError: `old` is not in it exactly once.
        """
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its text is {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def read_faults(path: Path = FAULTS_FILE) -> tuple[Fault, ...]:
    """All faults, in the order of the file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)
