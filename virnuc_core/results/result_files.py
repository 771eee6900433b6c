"""The result files of a run: how run.json records them, so that a changed one is noticed."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from virnuc_core.errors import DamagedFileError
from virnuc_core.files import from_json, parse_object


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
        named = from_json(_Files, {"files": parse_object(report.read_bytes())["files"]}).files
    except (OSError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"{report} does not say what the result files of the run are ({error!r}): run the same command again."
        ) from error
    return {record.name: FileRecord(size=record.size, sha256=record.sha256) for record in named}


def require_unchanged(report: Path, apart_from: Path) -> None:
    """Compares the result files beside a run.json with what it says of them; one that was deleted is passed over.

    Args:
        report: the run.json.
        apart_from: a result file that is about to be written again.

    Raises:
        DamagedFileError: run.json does not say what they are, or some are not as they were; names each.
    """
    records = {report.parent / name: record for name, record in read_records(report).items()}
    existing = [path for path in records if path != apart_from and path.exists()]
    if changed := [str(path) for path in existing if FileRecord.of(path) != records[path]]:
        raise DamagedFileError(
            f"not as when {report.name} was written: {', '.join(changed)}. Run the command that made the run again: "
            "it writes the result files from the shards."
        )
