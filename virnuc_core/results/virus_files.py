"""The viral sequences of a run, contigs and proviruses, as a summary, BED, GFF3 and FASTA.

The columns of the summary are those of geNomad's, as far as virnuc knows them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import pyarrow as pa

from virnuc_core.results.writers import fasta_record

SUMMARY_SCHEMA: Final = pa.schema(
    [
        ("seq_name", pa.string()),
        ("length", pa.int64()),
        ("topology", pa.string()),
        ("coordinates", pa.string()),
        ("virus_score", pa.float64()),
        ("fdr", pa.float64()),
        ("class", pa.string()),
        ("confidence", pa.string()),
    ]
)
_REPEAT_BASES: Final = 20
_COMPLEMENT: Final = bytes.maketrans(b"ACGT", b"TGCA")


@dataclass(frozen=True, kw_only=True, slots=True)
class ViralSequence:
    """A viral contig or a provirus.

    Attributes:
        contig: its name, already safe in tables (`virnuc_core.plain_text`).
        contig_length: in bp.
        start: 0-based.
        end: exclusive.
        bases: of the sequence alone.
        is_provirus: part of a contig.
        score: `virus_score`.
        fdr: expected share of false calls among the sequences with its score or more; None if unknown.
        virus_class: None if the head tells none.
        confidence: in the call.
    """

    contig: str
    contig_length: int
    start: int
    end: int
    bases: bytes
    is_provirus: bool
    score: float
    fdr: float | None
    virus_class: str | None
    confidence: str

    @property
    def name(self) -> str:
        """As in the summary and the FASTA file."""
        return f"{self.contig}|provirus_{self.start + 1}_{self.end}" if self.is_provirus else self.contig

    @property
    def topology(self) -> str:
        """As in the summary."""
        return "provirus" if self.is_provirus else terminal_repeats(self.bases)


def terminal_repeats(bases: bytes) -> str:
    """Gives "DTR" or "ITR" for a sequence that ends as it begins, directly or inverted, over 20 bases or more; else "linear"."""
    begin = bases[:_REPEAT_BASES]
    if len(bases) < 2 * _REPEAT_BASES or begin.translate(None, b"ACGT"):
        return "linear"
    place = bases.rfind(begin)
    if place >= len(bases) / 2 and bases.startswith(bases[place:]):
        return "DTR"
    return "ITR" if bases[-_REPEAT_BASES:].translate(_COMPLEMENT)[::-1] == begin else "linear"


def summary_table(sequences: Sequence[ViralSequence]) -> pa.Table:
    """Rows of virus_summary; coordinates are 1-based and inclusive, and null for whole contigs."""
    rows = [
        {
            "seq_name": one.name,
            "length": one.end - one.start,
            "topology": one.topology,
            "coordinates": f"{one.start + 1}-{one.end}" if one.is_provirus else None,
            "virus_score": one.score,
            "fdr": one.fdr,
            "class": one.virus_class,
            "confidence": one.confidence,
        }
        for one in sequences
    ]
    return pa.Table.from_pylist(rows, SUMMARY_SCHEMA)


def bed_lines(sequences: Iterable[ViralSequence]) -> bytes:
    """BED6: 0-based, half-open; the score is 1,000 times the `virus_score`."""
    lines = []
    for one in sequences:
        # BED readers take lines with these prefixes for headers.
        is_mistaken = one.contig.startswith(("#", "track", "browser"))
        contig = f"%{ord(one.contig[0]):02X}{one.contig[1:]}" if is_mistaken else one.contig
        lines.append(f"{contig}\t{one.start}\t{one.end}\t{one.name}\t{round(1000 * one.score)}\t.\n")
    return "".join(lines).encode()


def gff3_lines(sequences: Iterable[ViralSequence]) -> bytes:
    """GFF3 with the type `viral_sequence` (SO:0001041)."""
    lines = []
    last = ""
    for one in sequences:
        contig = _gff3_name(one.contig)
        if contig != last:
            lines.append(f"##sequence-region {contig} 1 {one.contig_length}\n")
        last = contig
        columns = f"{contig}\tvirnuc\tviral_sequence\t{one.start + 1}\t{one.end}\t{one.score:.6f}\t.\t."
        attributes = f"ID={_gff3_name(one.name)};topology={one.topology};confidence={one.confidence}"
        lines.append(f"{columns}\t{attributes}\n")
    return "".join(lines).encode()


def fasta_records(sequences: Iterable[ViralSequence]) -> Iterable[bytes]:
    """One record for each sequence."""
    return (fasta_record(one.name, one.bases) for one in sequences)


def _gff3_name(name: str) -> str:
    """Percent-encodes, in UTF-8, what the first column does not allow. Source: the specification of GFF3 1.26."""
    return quote(name, safe=".:^*$@!+_?-|").replace("~", "%7E")
