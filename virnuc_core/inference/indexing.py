"""The frame store of a run, from its sequence files."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

from virnuc_core.errors import DamagedFileError
from virnuc_core.plan_comparison import require_same_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import read_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import input_digest
from virnuc_core.sequences.store_meta import StoreMeta, content_digest
from virnuc_core.specs import Alphabet, InputFile, Rows

_log = logging.getLogger(__name__)


def index_inputs(
    folder: RunFolder,
    inputs: list[str],
    chunk_length: int | None,
    alphabet: Alphabet,
    rows: Rows = "open_frames",
    min_length: int = 0,
) -> StoreMeta:
    """Builds the frame store, or keeps the one of the same files and settings.

    Raises:
        InputError: a file cannot be read, or nothing in it can be used; rejected.tsv says why.
        MismatchError: the folder holds a run over other files or chunks.
    """
    if not _has_store_of(folder, inputs, chunk_length, alphabet, rows, min_length):
        build_frame_store(
            inputs,
            folder.frames,
            chunk_length,
            alphabet,
            rows=rows,
            min_length=min_length,
            rejected_copy=folder.rejected,
        )
    return StoreMeta.read(folder.frames)


def _has_store_of(
    folder: RunFolder,
    inputs: list[str],
    chunk_length: int | None,
    alphabet: Alphabet,
    rows: Rows,
    min_length: int,
) -> bool:
    """Whether the store of these files is there; the files are read only when there is one to compare with.

    Raises:
        MismatchError: the folder holds a run over other files or chunks.
    """
    if not folder.plan.exists() and not folder.frames.exists():
        return False
    files = tuple(input_digest(path) for path in inputs)
    if folder.plan.exists():
        _require_same_input(folder, files, chunk_length, rows, min_length)
    return _is_store_of(folder.frames, files, chunk_length, alphabet, rows, min_length)


def _require_same_input(
    folder: RunFolder,
    files: tuple[InputFile, ...],
    chunk_length: int | None,
    rows: Rows,
    min_length: int,
) -> None:
    """Asks before the old frame store makes room for a new one."""
    existing = read_plan(folder.plan)
    digest = existing.input_digest
    if [file.sha256 for file in files] != [file.sha256 for file in existing.inputs]:
        digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    wanted = replace(
        existing,
        inputs=files,
        input_digest=digest,
        chunk_length=chunk_length,
        rows=rows,
        min_length=min_length,
    )
    require_same_plan(existing, wanted, folder)


def _is_store_of(
    path: Path,
    files: tuple[InputFile, ...],
    chunk_length: int | None,
    alphabet: Alphabet,
    rows: Rows,
    min_length: int,
) -> bool:
    if not path.exists():
        return False
    try:
        meta = FrameStore.open(path).meta
    except DamagedFileError as error:
        _log.warning("%s It is made again.", error)
        return False
    digests = [file.sha256 for file in files]
    same_files = [file.sha256 for file in meta.inputs] == digests
    found = (meta.chunk_length, meta.alphabet, meta.rows, meta.min_length)
    if not same_files or found != (chunk_length, alphabet, rows, min_length):
        return False
    # Read whole, as the inputs have been: every row would be computed from a byte that is not as it was.
    if content_digest(path) != meta.content_sha256:
        _log.warning("frame store %s is not as it was written: it is made again", path)
        return False
    return True
