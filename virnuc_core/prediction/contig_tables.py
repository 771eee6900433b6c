"""What is said of whole contigs: the rows of contigs.tsv, and the bases of the viral ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from virnuc_core.atomic_write import atomic_path
from virnuc_core.prediction.verdicts import VIRUS, ContigTotals, call_contig, tier_contig
from virnuc_core.sequences.frame_store import FrameStore

CONTIG_SCHEMA: Final = pa.schema(
    [
        ("contig", pa.string()),
        ("record", pa.int64()),
        ("length", pa.int64()),
        ("chunks", pa.int64()),
        ("scored_chunks", pa.int64()),
        ("viral_chunks", pa.int64()),
        ("share_viral", pa.float64()),
        ("mean_p", pa.float64()),
        ("call", pa.string()),
        ("tier", pa.string()),
        ("dna_alone_chunks", pa.int64()),
    ]
)
CONTIG_COLUMNS: Final = tuple(CONTIG_SCHEMA.names)
_FASTA_LINE: Final = 80


def contig_table(store: FrameStore, first: int, totals: ContigTotals) -> pa.Table:
    """The rows of contigs.tsv.

    Args:
        store: has the names and lengths of the contigs.
        first: row of the first contig.
        totals: of the contigs from there on.
    """
    rows = slice(first, first + len(totals.chunks))
    scored = totals.scored_chunks
    is_empty = scored == 0
    some = np.maximum(scored, 1)
    of_tiers = (scored, totals.viral_chunks, totals.p_sum, totals.dna_alone_chunks)
    sums = list(zip(*(column.tolist() for column in of_tiers), strict=True))
    columns = (
        store.record_names(rows.start, rows.stop),
        store.record_number[rows],
        store.record_length[rows],
        totals.chunks,
        scored,
        totals.viral_chunks,
        pa.array(totals.viral_chunks / some, mask=is_empty),
        pa.array(totals.p_sum / some, mask=is_empty),
        [call_contig(scored_chunks, p_sum) for scored_chunks, _, p_sum, _ in sums],
        [tier_contig(*row) for row in sums],
        totals.dna_alone_chunks,
    )
    return pa.table(dict(zip(CONTIG_COLUMNS, columns, strict=True)), CONTIG_SCHEMA)


class ViralFasta:
    """Writes the contigs that are called virus.

    Args:
        store: has their bases.
        stream: where to write.
    """

    def __init__(self, store: FrameStore, stream: GzipFile) -> None:
        self._store = store
        self._stream = stream

    def extend(self, first: int, contigs: pa.Table) -> None:
        """Takes in the next contigs, the one in row `first` of the store and those after it."""
        named = zip(
            *(contigs[name].to_pylist() for name in ("contig", "call", "mean_p", "tier")), strict=True
        )
        for row, (name, call, mean_p, tier) in enumerate(named, first):
            if call == VIRUS:
                bases = self._store.sequence(row)
                lines = (bases[i : i + _FASTA_LINE] for i in range(0, len(bases), _FASTA_LINE))
                header = f">{name} mean_p={mean_p:.6f} tier={tier}\n".encode()
                self._stream.write(header + b"\n".join(lines) + b"\n")


@contextmanager
def open_viral_fasta(path: Path, store: FrameStore) -> Iterator[ViralFasta]:
    """A FASTA file, compressed with gzip, that appears when the block has ended without an error."""
    # Without name and time, equal sequences are equal files.
    with (
        atomic_path(path) as temporary,
        temporary.open("wb") as raw,
        GzipFile("", "wb", 6, raw, mtime=0) as stream,
    ):
        yield ViralFasta(store, stream)
