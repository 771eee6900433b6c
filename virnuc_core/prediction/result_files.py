"""The result files of a run: how run.json records them, so that a changed one is noticed."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from virnuc_core.errors import DamagedFileError
from virnuc_core.json_records import parse_object, record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What identifies a file: its size in bytes, and the SHA-256 of its content."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Reads a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(size=file.tell(), sha256=digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class _NamedRecord:
    """A file as run.json has it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """The part of run.json that is about files."""

    files: tuple[_NamedRecord, ...]


def records_of(paths: Sequence[Path]) -> list[dict[str, str | int]]:
    """What run.json says of files."""
    return [{"name": path.name, **asdict(FileRecord.of(path))} for path in paths]


def read_records(report: Path) -> dict[str, FileRecord]:
    """What a run.json says of the result files, by their names.

    Raises:
        DamagedFileError: it cannot be read, or does not say.
    """
    try:
        named = record_of(_Files, {"files": parse_object(report.read_bytes())["files"]}).files
    except (OSError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"{report} does not say what the result files of the run are ({error!r}): run the same command again."
        ) from error
    return {record.name: FileRecord(size=record.size, sha256=record.sha256) for record in named}
