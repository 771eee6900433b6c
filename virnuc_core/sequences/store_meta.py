"""What a frame store says about itself: its counts, its origin and a digest of its content."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from virnuc_core.atomic_write import write_text
from virnuc_core.errors import DamagedFileError
from virnuc_core.json_records import parse_object, record_of
from virnuc_core.specs import Alphabet, InputFile, Rows

SCHEMA_VERSION: Final = 3
REJECTED_NAME: Final = "rejected.tsv"
_META_NAME: Final = "meta.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """What a frame store holds and where it came from.

    Attributes:
        chunk_length: chunk length in bp; None when whole sequences are stored.
        alphabet: what the input records are.
        rows: of what there is a row; says nothing when whole sequences are stored.
        inputs: the input files.
        num_records: used records.
        num_chunks: their chunks.
        num_frames: the rows of a run: frames, or records when whole sequences are stored.
        num_closed: those of them that are chunks without an open frame.
        num_rejected: records that were not used.
        num_renamed: records that got a number because an earlier one has the same name.
        content_sha256: hex digest over everything that a run computes with.
        min_length: records with fewer letters were not used.
        schema_version: of the folder.
    """

    chunk_length: int | None
    alphabet: Alphabet
    rows: Rows
    inputs: tuple[InputFile, ...]
    num_records: int
    num_chunks: int
    num_frames: int
    num_closed: int
    num_rejected: int
    num_renamed: int
    content_sha256: str
    min_length: int = 0
    schema_version: int = SCHEMA_VERSION

    def write(self, folder: Path) -> None:
        """Writes meta.json, which makes the folder a store."""
        write_text(folder / _META_NAME, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder has a meta.json, of whatever state."""
        return (folder / _META_NAME).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads meta.json.

        Raises:
            DamagedFileError: it is missing, makes no sense, or is of another schema version.
            OSError: it cannot be read.
        """
        path = folder / _META_NAME
        try:
            meta = record_of(cls, parse_object(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise DamagedFileError(
                f"{folder} is not a whole frame store: {path.name} cannot be used ({error!r}). "
                "Delete the folder and run again."
            ) from error
        if meta.schema_version != SCHEMA_VERSION:
            raise DamagedFileError(
                f"{folder} is a frame store of schema version {meta.schema_version}; this program reads "
                f"version {SCHEMA_VERSION}. Delete the folder and run again."
            )
        return meta


def content_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a store's columns."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.bin")):
        with open(path, "rb") as stream:
            digest.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
