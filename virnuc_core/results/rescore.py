"""Re-scoring of stored vectors with another head."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.inference.runner import Scorer
from virnuc_core.models.catalogue import resolve_head
from virnuc_core.models.heads import load_head
from virnuc_core.results.embeddings import FEATURES, SCORES, SIZES, VECTORS, Embeddings
from virnuc_core.results.tables import FRAME_COLUMNS, frame_lines
from virnuc_core.results.writers import ResultWriter, header_line

_BLOCK_ROWS: Final = 2048


def score_embeddings(embeddings: Path, head: str, out: Path) -> int:
    """Writes a table like `prediction_results.txt` from an embeddings file, block by block; returns its number of rows.

    `head` is the name of a bundled one or a path. Scores of float16 vectors differ slightly from those of the run, which are
    computed before rounding.

    Raises:
        CheckpointError: the head cannot be used, or a torch file holds more than tensors and names.
        DamagedFileError: the embeddings file is corrupt, or is another kind of file.
        InputError: the embeddings file does not exist.
        MismatchError: the head takes features of another width, or was trained for chunks of another length or for other frames.
        UsageError: the file does not hold the vectors of both models, or lacks the sizes of its stretches.
    """
    with Embeddings(embeddings) as file:
        matrices = _matrices_of_both_models(file)
        chunk_length = file.attrs.get("chunk_length") or None
        scorer = Scorer(load_head(resolve_head(head, chunk_length, file.frames)), "cpu")
        needs_sizes = file.frames == "longest"
        if needs_sizes and SIZES not in file:
            raise UsageError(
                f"{file.path} has no {SIZES!r}, which a head for the longest stop-free stretches needs. Give the embeddings.h5 "
                "of a predict run."
            )
        with ResultWriter().stream(out) as write:
            write(header_line(FRAME_COLUMNS))
            for begin in range(0, len(file), _BLOCK_ROWS):
                end = min(begin + _BLOCK_ROWS, len(file))
                parts = [_finite_rows(file, name, begin, end) for name in matrices]
                sizes = file.rows(SIZES, begin, end) if needs_sizes else None
                ids = pa.array(file.read_ids(begin, end), pa.string())
                write(frame_lines(ids, scorer.score(*parts, sizes=sizes)[SCORES]))
        return len(file)


def _matrices_of_both_models(file: Embeddings) -> tuple[str, ...]:
    missing = [name for name in VECTORS.values() if name not in file]
    if missing and FEATURES in file:
        return (FEATURES,)
    if missing:
        raise UsageError(
            f"{file.path} has no {' and no '.join(missing)} vectors. Give the embeddings.h5 of a "
            "predict run that was made without --embeddings none."
        )
    return tuple(VECTORS.values())


def _finite_rows(file: Embeddings, name: str, begin: int, end: int) -> npt.NDArray[Any]:
    values = file.rows(name, begin, end)
    is_finite = np.isfinite(values).all(axis=1)
    if not is_finite.all():
        row = begin + int(is_finite.argmin())
        raise DamagedFileError(
            f"embeddings file {file.path}: row {row} of {name!r} holds numbers that are not finite: make the file again."
        )
    return values
