"""What is said of whole contigs: the rows of contigs.tsv, and the bases of the viral ones."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from virnuc_core.results.text_table import fasta_record, six_decimals
from virnuc_core.results.verdicts import VIRUS, ContigTotals, call_contig, tier_contig
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


def contig_table(store: FrameStore, first: int, totals: ContigTotals, threshold: float) -> pa.Table:
    """The rows of contigs.tsv.

    Args:
        store: has the names and lengths of the contigs.
        first: row of the first contig.
        totals: of the contigs from there on.
        threshold: mean p_virus from which a contig is called virus.
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
        [call_contig(scored_chunks, p_sum, threshold) for scored_chunks, _, p_sum, _ in sums],
        [tier_contig(chunks, viral, p_sum, alone, threshold) for chunks, viral, p_sum, alone in sums],
        totals.dna_alone_chunks,
    )
    return pa.table(dict(zip(CONTIG_COLUMNS, columns, strict=True)), CONTIG_SCHEMA)


def viral_records(store: FrameStore, first: int, contigs: pa.Table, threshold: float) -> Iterator[bytes]:
    """FASTA records of the contigs that are called virus.

    Args:
        store: has their bases.
        first: row of the first contig there.
        contigs: their `contig_table`.
        threshold: mean p_virus from which a contig is called virus.
    """
    columns = (contigs[name].to_pylist() for name in ("contig", "call", "mean_p", "tier"))
    for row, (name, call, mean_p, tier) in enumerate(zip(*columns, strict=True), first):
        if call == VIRUS:
            header = f"{name} mean_p={six_decimals(mean_p, threshold)} tier={tier}"
            yield fasta_record(header, store.sequence(row))
