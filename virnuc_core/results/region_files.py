"""Viral regions as tables, as BED, as GFF3, and their bases as FASTA.

Names of contigs are harmless in tables already (`virnuc_core.plain_text`); what means something in one of the other
formats is escaped as that format says, or else as `%XX`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import IO, Final
from urllib.parse import quote

import pyarrow as pa

from virnuc_core.results.parquet_table import ParquetTable
from virnuc_core.results.regions import Region
from virnuc_core.results.result_sinks import Content, ResultSinks
from virnuc_core.results.text_table import fasta_record, header_line, six_decimals
from virnuc_core.run_folder import RunFolder

REGION_SCHEMA: Final = pa.schema(
    [
        ("contig", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("length", pa.int64()),
        ("chunks", pa.int64()),
        ("score", pa.float64()),
        ("mean_p", pa.float64()),
        ("tier", pa.string()),
        ("dna_alone_chunks", pa.int64()),
    ]
)
REGION_COLUMNS: Final = tuple(REGION_SCHEMA.names)
_GFF3_HEADER: Final = "##gff-version 3\n"
# Besides letters and digits, what may stand in the first column of GFF3 as it is.
_GFF3_PLAIN: Final = ".:^*$@!+_?-|"
# Lines that begin so are no regions to readers of BED.
_BED_SPECIAL: Final = ("#", "track", "browser")
_LARGEST_BED_SCORE: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRegion:
    """A region, and where it lies.

    Attributes:
        contig: name of its contig.
        contig_length: bases of that.
        number: place among the regions of the contig, from 1.
        region: the region.
        mean_p: its mean p_virus as text.
    """

    contig: str
    contig_length: int
    number: int
    region: Region
    mean_p: str


class RegionFiles:
    """Writes regions in every form.

    Args:
        folder: the run's folder.
        sinks: open its files.
        stack: closes them.
        threshold: p_virus from which chunks are called virus.
    """

    def __init__(self, folder: RunFolder, sinks: ResultSinks, stack: ExitStack, threshold: float) -> None:
        self._threshold = threshold
        self._table: IO[str] = stack.enter_context(sinks.text(folder.regions))
        self._bed: IO[str] = stack.enter_context(sinks.text(folder.regions_bed))
        self._gff3: IO[str] = stack.enter_context(sinks.text(folder.regions_gff3))
        self._parquet: ParquetTable = stack.enter_context(
            sinks.parquet(folder.regions_parquet, REGION_SCHEMA)
        )
        self._fasta: Content = stack.enter_context(sinks.gzip(folder.regions_fasta))
        self._table.write(header_line(REGION_COLUMNS))
        self._gff3.write(_GFF3_HEADER)

    def extend(
        self,
        regions: Iterable[Region],
        names: Sequence[str],
        lengths: Sequence[int],
        bases_of: Callable[[int], bytes],
    ) -> None:
        """Takes in the regions of the next contigs.

        Args:
            regions: in order of contig and place.
            names: of the contigs, by their number.
            lengths: of the contigs, in bases.
            bases_of: gives the bases of a contig, by its number.
        """
        rows = []
        for contig, own in groupby(regions, key=attrgetter("contig")):
            bases = bases_of(contig)
            for number, region in enumerate(own, 1):
                named = NamedRegion(
                    contig=names[contig],
                    contig_length=lengths[contig],
                    number=number,
                    region=region,
                    mean_p=six_decimals(region.mean_p, self._threshold),
                )
                rows.append(table_row(named))
                self._table.write(table_line(named))
                self._bed.write(bed_line(named))
                self._gff3.write(gff3_lines(named))
                self._fasta.write(fasta_record(fasta_header(named), bases[region.start : region.end]))
        self._parquet.append(pa.Table.from_pylist(rows, REGION_SCHEMA))


def table_row(named: NamedRegion) -> dict[str, str | int | float]:
    """A row of regions.parquet; start and end are 1-based and inclusive."""
    region = named.region
    return {
        "contig": named.contig,
        "start": region.start + 1,
        "end": region.end,
        "length": region.end - region.start,
        "chunks": region.chunks,
        "score": region.score,
        "mean_p": region.mean_p,
        "tier": region.tier,
        "dna_alone_chunks": region.dna_alone_chunks,
    }


def table_line(named: NamedRegion) -> str:
    """A line of regions.tsv: the row, with rounded numbers."""
    cells = {**table_row(named), "score": f"{named.region.score:.2f}", "mean_p": named.mean_p}
    return "\t".join(map(str, cells.values())) + "\n"


def fasta_header(named: NamedRegion) -> str:
    """The header of a record of regions.fa.gz: contig, first and last base from 1, and how sure the region is."""
    region = named.region
    place = f"{named.contig}:{region.start + 1}-{region.end}"
    return f"{place} score={region.score:.2f} mean_p={named.mean_p} tier={region.tier}"


def bed_line(named: NamedRegion) -> str:
    """A line of BED with six columns: 0-based, the end not included; ten times the score, from 0 to 1000."""
    region = named.region
    contig = named.contig
    if contig.startswith(_BED_SPECIAL):
        contig = f"%{ord(contig[0]):02X}{contig[1:]}"
    score = min(max(round(10 * region.score), 0), _LARGEST_BED_SCORE)
    return f"{contig}\t{region.start}\t{region.end}\tregion_{named.number}_{region.tier}\t{score}\t.\n"


def gff3_lines(named: NamedRegion) -> str:
    """A feature of GFF3 and, before the first one of a contig, the length of that.

    Source: the specification of GFF3 1.26, for what is escaped.
    """
    region = named.region
    contig = gff3_name(named.contig)
    directive = f"##sequence-region {contig} 1 {named.contig_length}\n" if named.number == 1 else ""
    columns = f"{contig}\tvirnuc\tviral_sequence\t{region.start + 1}\t{region.end}\t{region.score:.2f}\t.\t."
    facts = f"chunks={region.chunks};mean_p={named.mean_p};tier={region.tier}"
    facts += f";dna_alone_chunks={region.dna_alone_chunks}"
    return f"{directive}{columns}\tID={contig}.region_{named.number};{facts}\n"


def gff3_name(name: str) -> str:
    """A name in which everything that GFF3 does not let stand is `%XX`, one for each byte of its UTF-8."""
    return quote(name, safe=_GFF3_PLAIN).replace("~", "%7E")
