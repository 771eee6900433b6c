"""Labels from annotation: GenBank files taken apart into labelled FASTA.

A record is viral when its lineage is one of viruses, and belongs to its domain (bacteria, archaea, eukaryota) when it
is of a cell. Records without either, such as plasmids and constructs of unknown origin, are left out. Regions of
cellular records that are annotated as prophages or proviruses belong to neither class: they are cut out, and what is
left of the record on their two sides becomes records of its own.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from Bio import BiopythonParserWarning, SeqIO
from Bio.Seq import UndefinedSequenceError
from Bio.SeqRecord import SeqRecord

from virnuc_core.errors import InputError
from virnuc_core.files import atomic_path
from virnuc_core.plain_text import visible
from virnuc_core.sequences.reader import reading_text

VIRAL: Final = "viral"
_BEGINNING: Final = b"LOCUS "
_DOMAINS: Final = ("Bacteria", "Archaea", "Eukaryota")
# What regions of foreign origin are annotated as, and where it is said what they are.
_REGION_TYPES: Final = frozenset({"source", "mobile_element", "misc_feature", "region", "repeat_region"})
_REGION_WORDS: Final = re.compile(r"\b(prophages?|provirus(es)?|proviral)\b", re.IGNORECASE)
_REGION_QUALIFIERS: Final = ("mobile_element_type", "note", "label", "standard_name", "region_name")
_WRONG_LENGTH: Final = "Expected sequence length"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenBankCounts:
    """What was found in GenBank files.

    Attributes:
        records: records read.
        left_out: those whose lineage does not say whether they are viral.
        prophages: regions that were cut out of cellular records.
    """

    records: int = 0
    left_out: int = 0
    prophages: int = 0


def is_genbank(path: str) -> bool:
    """Whether a file, compressed or not, begins as GenBank does.

    Raises:
        InputError: it cannot be read.
    """
    with reading_text(path) as text:
        return text.peek(len(_BEGINNING)).startswith(_BEGINNING)


def take_apart(genbank: str, fasta: Path, table: Path) -> GenBankCounts:
    """Writes the sequences of a GenBank file as FASTA and their classes as a table `record class`.

    Raises:
        InputError: the file is damaged, or a record has no sequence.
    """
    records = left_out = prophages = 0
    with (
        atomic_path(fasta) as new_fasta,
        atomic_path(table) as new_table,
        new_fasta.open("w", encoding="utf-8") as sequences,
        new_table.open("w", encoding="utf-8") as labels,
    ):
        labels.write("record\tclass\n")
        for record in _iter_records(genbank):
            records += 1
            class_name = _class_of(record)
            if class_name is None:
                left_out += 1
                continue
            regions = () if class_name == VIRAL else _prophages(record)
            prophages += len(regions)
            for name, sequence in _pieces(record, regions):
                sequences.write(f">{name}\n{sequence}\n")
                labels.write(f"{name}\t{class_name}\n")
    if left_out:
        _log.warning(
            "%d of %d records of %s are left out: their lineage is neither of viruses nor of cells",
            left_out,
            records,
            visible(genbank),
        )
    return GenBankCounts(records=records, left_out=left_out, prophages=prophages)


def _iter_records(path: str) -> Iterator[SeqRecord]:
    number = 0
    with reading_text(path) as text, _damage_of(path):
        if not text.peek(len(_BEGINNING)).startswith(_BEGINNING):
            raise InputError(f"{path} is not GenBank: it does not begin with LOCUS.")
        with io.TextIOWrapper(text, encoding="utf-8") as lines:
            for record in SeqIO.parse(lines, "genbank"):
                number += 1
                _require_sequence(path, record)
                yield record
    if number == 0:
        raise InputError(f"{path} holds no whole GenBank record. Download it again.")


def _require_sequence(path: str, record: SeqRecord) -> None:
    try:
        str(record.seq)
    except UndefinedSequenceError as error:
        raise InputError(
            f"record {record.id} of {path} has no sequence, only a length. Download it with its sequence "
            '("GenBank (full)").'
        ) from error


@contextmanager
def _damage_of(path: str) -> Iterator[None]:
    """What Biopython raises or warns of for records that are not whole, in our words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BiopythonParserWarning)
        warnings.filterwarnings("error", _WRONG_LENGTH, BiopythonParserWarning)
        try:
            yield
        except (ValueError, AssertionError, LookupError, BiopythonParserWarning) as error:
            raise InputError(f"{path} is damaged GenBank: {error}. Download it again.") from error


def _class_of(record: SeqRecord) -> str | None:
    lineage = cast("list[str]", record.annotations.get("taxonomy", []))
    if "Viruses" in lineage:
        return VIRAL
    return next((domain.lower() for domain in _DOMAINS if domain in lineage), None)


def _prophages(record: SeqRecord) -> tuple[tuple[int, int], ...]:
    """Begin and end (0-based, half open) of the regions annotated as prophage, in order, without overlap."""
    regions: list[tuple[int, int]] = []
    for feature in record.features:
        if feature.location is None or feature.type not in _REGION_TYPES:
            continue
        described = " ".join(text for name in _REGION_QUALIFIERS for text in feature.qualifiers.get(name, ()))
        # The free text of the source of a whole record is about the organism ("has two prophages"), not about a region.
        is_organism = feature.type == "source" and len(feature.location) == len(record)
        if "proviral" in feature.qualifiers or (not is_organism and _REGION_WORDS.search(described)):
            regions += [(int(part.start), int(part.end)) for part in feature.location.parts]
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(regions):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def _pieces(record: SeqRecord, regions: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    """Name and bases of what is left of a record without the regions; pieces are named by their bases, from 1."""
    sequence = str(record.seq)
    if not regions:
        yield str(record.id), sequence
        return
    begins = [0, *(end for _, end in regions)]
    ends = [*(begin for begin, _ in regions), len(sequence)]
    for begin, end in zip(begins, ends, strict=True):
        if begin < end:
            yield f"{record.id}:{begin + 1}-{end}", sequence[begin:end]
