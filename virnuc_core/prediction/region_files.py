"""Viral regions as a table, as BED and as GFF3.

Names of contigs are harmless in tables already (`virnuc_core.plain_text`); what means something in one of the other
formats is escaped as that format says, or else as `%XX`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final, TextIO
from urllib.parse import quote

from virnuc_core.prediction.regions import Region
from virnuc_core.prediction.text_table import open_table, open_text
from virnuc_core.run_folder import RunFolder

REGION_COLUMNS: Final = (
    *("contig", "start", "end", "length", "chunks", "score", "mean_p", "tier"),
    "dna_alone_chunks",
)
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
    """

    contig: str
    contig_length: int
    number: int
    region: Region


class RegionFiles:
    """Writes regions in every form.

    Args:
        table: regions.tsv.
        bed: regions.bed.
        gff3: regions.gff3.
    """

    def __init__(self, table: TextIO, bed: TextIO, gff3: TextIO) -> None:
        self._table = table
        self._bed = bed
        self._gff3 = gff3

    def extend(self, regions: Iterable[Region], names: Sequence[str], lengths: Sequence[int]) -> None:
        """Takes in the regions of the next contigs.

        Args:
            regions: in order of contig and place.
            names: of the contigs, by their number.
            lengths: of the contigs, in bases.
        """
        for contig, own in groupby(regions, key=attrgetter("contig")):
            for number, region in enumerate(own, 1):
                named = NamedRegion(
                    contig=names[contig], contig_length=lengths[contig], number=number, region=region
                )
                self._table.write(table_line(named))
                self._bed.write(bed_line(named))
                self._gff3.write(gff3_lines(named))


@contextmanager
def open_region_files(folder: RunFolder) -> Iterator[RegionFiles]:
    """The three files of a run; they appear when the block has ended without an error."""
    with (
        open_table(folder.regions, REGION_COLUMNS) as table,
        open_text(folder.regions_bed) as bed,
        open_text(folder.regions_gff3) as gff3,
    ):
        gff3.write(_GFF3_HEADER)
        yield RegionFiles(table, bed, gff3)


def table_line(named: NamedRegion) -> str:
    """A line of regions.tsv; start and end are 1-based and inclusive."""
    region = named.region
    where = f"{named.contig}\t{region.start + 1}\t{region.end}\t{region.end - region.start}"
    facts = f"{region.score:.2f}\t{region.mean_p:.6f}\t{region.tier}\t{region.dna_alone_chunks}"
    return f"{where}\t{region.chunks}\t{facts}\n"


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
    facts = f"chunks={region.chunks};mean_p={region.mean_p:.6f};tier={region.tier}"
    facts += f";dna_alone_chunks={region.dna_alone_chunks}"
    return f"{directive}{columns}\tID={contig}.region_{named.number};{facts}\n"


def gff3_name(name: str) -> str:
    """A name in which everything that GFF3 does not let stand is `%XX`, one for each byte of its UTF-8."""
    return quote(name, safe=_GFF3_PLAIN).replace("~", "%7E")
