"""Scores of stored vectors by another head."""

from pathlib import Path
from typing import Final

import numpy as np

from virnuc_core.errors import UsageError
from virnuc_core.inference.scorer import Scorer
from virnuc_core.models.catalogue import resolve_head
from virnuc_core.prediction.chunk_tables import FRAME_COLUMNS, frame_rows
from virnuc_core.prediction.embeddings_file import VECTORS, EmbeddingsFile, require_embeddings
from virnuc_core.prediction.text_table import open_table

_BLOCK_ROWS: Final = 2048


def score_embeddings(embeddings: Path, head: str, out: Path, dna_head: str | None = None) -> int:
    """Writes a table like `prediction_results.txt` from an embeddings file, a block of rows at a time.

    Scores of float16 vectors differ a little from those of the run, which are made before rounding.

    Args:
        embeddings: the `embeddings.h5` of a predict run.
        head: name of a bundled head, or path of one.
        out: the table.
        dna_head: the same as `head`, for chunks without an open frame; None leaves them out.

    Returns:
        Number of rows of the table.

    Raises:
        CheckpointError: a head cannot be used.
        DamagedFileError: the embeddings file is not whole, or is another kind of file.
        InputError: there is no such file.
        MismatchError: a head takes features of another width, or was trained for chunks of another length.
        UsageError: the file does not hold the vectors of both models.
    """
    require_embeddings(embeddings)
    num_rows = 0
    with EmbeddingsFile(embeddings) as file:
        chunk_length = file.attributes.get("chunk_length") or None
        dna_path = None if dna_head is None else resolve_head(dna_head, chunk_length)
        scorer = Scorer(resolve_head(head, chunk_length), "cpu", dna_path)
        missing = [name for name in VECTORS.values() if name not in file]
        if missing:
            raise UsageError(
                f"{embeddings} has no {' and no '.join(missing)} vectors. Give the embeddings.h5 of a "
                "predict run that was made without --embeddings none."
            )
        with open_table(out, FRAME_COLUMNS) as table:
            for begin in range(0, file.num_rows, _BLOCK_ROWS):
                end = min(begin + _BLOCK_ROWS, file.num_rows)
                dna, protein = (file.rows(VECTORS[family], begin, end) for family in ("dnabert_s", "esm2"))
                wanted = np.flatnonzero(protein.any(axis=1) | (dna_head is not None))
                names = file.ids(begin, end)
                ids = [names[row] for row in wanted.tolist()]
                table.writelines(frame_rows(ids, scorer.score(dna[wanted], protein[wanted])))
                num_rows += len(ids)
        return num_rows
