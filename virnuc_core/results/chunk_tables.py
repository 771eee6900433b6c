"""What is said of chunks and frames: the rows of predictions.tsv, and those of the two tables of VirNucPro."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from virnuc_core.results.verdicts import OTHER, UNSCORED, VIRUS, ChunkVerdicts
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import ROW_NAMES

PREDICTION_SCHEMA: Final = pa.schema(
    [
        ("contig", pa.string()),
        ("chunk", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("best_frame", pa.string()),
        ("p_virus", pa.float64()),
        ("call", pa.string()),
        ("status", pa.string()),
    ]
)
PREDICTION_COLUMNS: Final = tuple(PREDICTION_SCHEMA.names)
# Of a chunk without an open frame that has a score all the same.
DNA_ALONE_STATUS: Final = "dna_alone"
FRAME_COLUMNS: Final = ("Sequence_ID", "Prediction", "score1", "score2")
HIGHEST_SCORE_COLUMNS: Final = ("Modified_ID", "Is_Virus")


def prediction_table(store: FrameStore, begin: int, end: int, verdicts: ChunkVerdicts) -> pa.Table:
    """The rows of predictions.tsv; start and end are 1-based and inclusive.

    Args:
        store: has the chunks.
        begin: first chunk.
        end: one past the last.
        verdicts: on these.
    """
    records = store.chunk_record[begin:end]
    first = int(records[0])
    names = pa.array(store.record_names(first, int(records[-1]) + 1), pa.string())
    is_scored = verdicts.is_scored
    columns = (
        names.take(pa.array(records - first)),
        store.chunk_index[begin:end] + 1,
        store.chunk_start[begin:end] + 1,
        store.chunk_end[begin:end],
        pa.array(ROW_NAMES).take(pa.array(verdicts.best_frame, mask=~is_scored)),
        pa.array(verdicts.p_virus, mask=~is_scored),
        np.where(is_scored, np.where(verdicts.is_virus, VIRUS, OTHER), UNSCORED),
        np.select((verdicts.is_dna_alone, is_scored), (DNA_ALONE_STATUS, "scored"), "no_open_frame"),
    )
    return pa.table(dict(zip(PREDICTION_COLUMNS, columns, strict=True)), PREDICTION_SCHEMA)


def highest_score_rows(store: FrameStore, begin: int, end: int, verdicts: ChunkVerdicts) -> Iterator[str]:
    """Lines of prediction_results_highestscore.csv, unsorted: one for each chunk with an open frame.

    Args:
        store: has the chunks.
        begin: first chunk.
        end: one past the last.
        verdicts: on these.

    The chunk is True from 0.5 on, whatever the threshold of the run's own calls.

    Source: `determine_virus` in VirNucPro's prediction.py, written by pandas.
    """
    ids = store.chunk_ids(begin, end)
    for row in np.flatnonzero(verdicts.is_scored & ~verdicts.is_dna_alone).tolist():
        yield f"{ids[row]}\t{bool(verdicts.p_virus[row] >= 0.5)}\n"


def frame_rows(ids: list[str], scores: npt.NDArray[np.float32]) -> Iterator[str]:
    """Lines of `prediction_results.txt`: the shortest digits that give the fp32 value again.

    Args:
        ids: of n open frames.
        scores: fp32 (n, 2).

    Source: `make_predictdata` in VirNucPro's prediction.py, which writes `str` of each fp32 score and takes
    the first of two equal scores as the label.
    """
    labels = np.where(scores[:, 1] > scores[:, 0], "virus", "others").tolist()
    for name, label, (other, virus) in zip(ids, labels, scores, strict=True):
        yield f"{name}\t{label}\t{other!s}\t{virus!s}\n"
