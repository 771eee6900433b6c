"""Reads the Parquet tables of a run in blocks: sums over all contigs, and the most important ones."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.results.calls import CALLS, PROVIRUS, VIRUS
from virnuc_core.results.writers import count_values
from virnuc_core.run_folder import RunFolder

BINS: Final = 50  # of histograms


def iter_batches(
    path: Path, columns: Sequence[str] | None = None, batch_rows: int = 1 << 16
) -> Iterator[pa.RecordBatch]:
    """Reads a table of a run in blocks."""
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_rows, columns=columns)


def read_proviruses(folder: RunFolder) -> pa.Table:
    """Proviruses of virus_summary.parquet, with `contig`, `start` and `end` (1-based, inclusive)."""
    summary = pq.read_table(folder.summary_parquet)
    rows = summary.filter(pc.equal(summary["topology"], "provirus"))
    places = pc.extract_regex(rows["seq_name"], r"(?P<contig>(?s:.*))\|provirus_(?P<start>\d+)_(?P<end>\d+)$")
    for name, kind in (("contig", pa.string()), ("start", pa.int64()), ("end", pa.int64())):
        rows = rows.append_column(name, pc.struct_field(places, name).cast(kind))
    return rows


class Totals:
    """Sums over contigs.

    Attributes:
        values: contigs and bases.
        classes: contigs and bases by class and call.
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter({"contigs": 0, "bases": 0})
        self.classes: dict[tuple[str, str], Counter[str]] = {}
        self._confidence: Counter[str] = Counter()
        self._histogram = np.zeros(BINS, np.int64)

    def add(self, contigs: pa.Table) -> None:
        """Counts the next contigs."""
        self.values.update(contigs=len(contigs), bases=pc.sum(contigs["length"]).as_py() or 0)
        is_viral = pc.is_in(contigs["call"], pa.array([VIRUS, PROVIRUS]))
        self._confidence.update(count_values(contigs["confidence"].filter(is_viral)))
        self._histogram += histogram(contigs["virus_score"].drop_null().to_numpy())
        known = contigs.filter(contigs["class"].is_valid())
        grouped = known.group_by(["class", "call"], use_threads=False)
        for row in grouped.aggregate([([], "count_all"), ("length", "sum")]).to_pylist():
            own = self.classes.setdefault((row["class"], row["call"]), Counter())
            own.update(contigs=row["count_all"], bases=row["length_sum"])

    @property
    def document(self) -> dict[str, Any]:
        """As JSON values; confidence is of viral contigs and those with a provirus, the histogram is of scores."""
        return {
            **self.values,
            "confidence": dict(self._confidence),
            "histogram": self._histogram.tolist(),
        }


def histogram(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Counts of the scores (n,) in `BINS` equal bins of 0..1, ignoring NaN."""
    bins = np.minimum((scores[~np.isnan(scores)] * BINS + 1e-9).astype(np.int64), BINS - 1)
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def most_important(folder: RunFolder, limit: int, batch_rows: int, totals: Totals) -> pa.Table:
    """The contigs to keep if there are too many, with their `place` in the input: viral ones first, then by score and length.

    A few blocks more than the limit are held at a time. All contigs are added to the totals.
    """
    kept: list[pa.Table] = []
    first = 0
    for batch in iter_batches(folder.contigs_parquet, None, batch_rows):
        rows = pa.Table.from_batches([batch])
        totals.add(rows)
        kept.append(rows.append_column("place", pa.array(np.arange(first, first + len(rows)))))
        first += len(rows)
        if sum(map(len, kept)) >= 2 * limit:
            kept = [_most_important(kept, limit)]
    return _most_important(kept, limit)


def _most_important(tables: list[pa.Table], limit: int) -> pa.Table:
    rows = pa.concat_tables(tables)
    order = pc.index_in(rows["call"], pa.array(CALLS)).to_numpy()
    score = -np.nan_to_num(rows["virus_score"].to_numpy())
    keys = (rows["place"].to_numpy(), -rows["length"].to_numpy(), score, order)
    return rows.take(pa.array(np.lexsort(keys)[:limit]))
