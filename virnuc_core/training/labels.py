"""Labelled sequences: from files of one class each, tables, or GenBank.

A GenBank record is viral when its lineage is viral, and belongs to its domain (bacteria, archaea, eukaryota) when it is
cellular. Records with neither, such as plasmids and constructs of unknown origin, are left out. Regions of cellular records
annotated as prophages or proviruses belong to neither class: they are cut out, and the remaining pieces become separate records.
"""

import csv
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
from Bio import BiopythonParserWarning, SeqIO
from Bio.Seq import UndefinedSequenceError
from Bio.SeqRecord import SeqRecord

from virnuc_core.columns import Bool, Float64, Int64
from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import atomic_path
from virnuc_core.plain_text import visible
from virnuc_core.sequences.reader import STDIN, Record, iter_records, reading_text
from virnuc_core.training.metrics import KnownCalls
from virnuc_core.training.split import KinshipSketches, join_groups

VIRAL: Final = "viral"
OTHER: Final = "other"

# The class of all records of each sequence file, or the class of each record by name.
Sources = dict[str, str | Mapping[str, str]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledFiles:
    """Sequence files, and the origin of each record's class.

    Attributes:
        viral: FASTA or FASTQ of viruses only.
        other: FASTA or FASTQ of non-viral records only.
        genbank: the class of a record comes from its lineage.
        labelled: files whose records are in `labels`, or GenBank files.
        labels: table of `seq_name` and `label`, or else `class`; "viral" and "virus" are viruses, anything else is not.
    """

    viral: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    genbank: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    labels: str | None = None

    @property
    def sequences(self) -> tuple[str, ...]:
        """Every sequence file, as given."""
        return (*self.viral, *self.other, *self.genbank, *self.labelled)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file to be read, as given."""
        return (*self.sequences, *filter(None, [self.labels]))

    def replaced(self, change: Callable[[Sequence[str]], Sequence[str]]) -> "LabelledFiles":
        """The same with other paths."""
        names = ("viral", "other", "genbank", "labelled")
        table = change([self.labels])[0] if self.labels else None
        return LabelledFiles(**{name: tuple(change(getattr(self, name))) for name in names}, labels=table)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordTable:
    """The R records of all sources, in order, including unusable ones.

    Attributes:
        classes: (R,), index into class_names.
        class_names: the viral class first.
        lengths: (R,), bp.
        groups: (R,): related records have the same number; all differ unless grouping was requested.
    """

    names: tuple[str, ...]
    classes: Int64
    class_names: tuple[str, ...]
    lengths: Int64
    groups: Int64

    @property
    def is_viral(self) -> Bool:
        """Bool (R,)."""
        return np.asarray(self.classes == 0)

    def known_calls(self, rows: Int64, p_virus: Float64) -> KnownCalls:
        """Calls of n chunks or contigs with their true classes; `rows` (n,) are the rows of their records."""
        return KnownCalls(
            is_viral=self.is_viral[rows],
            p_virus=p_virus,
            classes=self.classes[rows],
            class_names=self.class_names,
            lengths=self.lengths[rows],
        )


def open_sources(files: LabelledFiles, scratch: Path) -> tuple[Sources, Counter[str]]:
    """The files to be read, where GenBank files are converted to FASTA in `scratch`, and counts as of `convert_genbank`.

    Raises:
        UsageError: no file is given, a file is given twice, or a table is missing or not needed.
        InputError: a file cannot be read.
    """
    if not files.sequences:
        raise UsageError("no sequences given: use --viral and --other, --genbank, or --labels with a file.")
    if STDIN in files.sequences:
        raise UsageError(
            "labelled sequences cannot come from standard input (-): they are read more than once."
        )
    if files.labels is not None and not files.labelled:
        raise UsageError("--labels applies to files given without a flag, and there are none.")
    [(place, times)] = Counter(Path(path).absolute() for path in files.sequences).most_common(1)
    if times > 1:
        raise UsageError(f"{place} is given twice: a file has only one class.")
    sources: Sources = {**dict.fromkeys(files.viral, VIRAL), **dict.fromkeys(files.other, OTHER)}
    table = None if files.labels is None else read_table(files.labels, "label", "class")
    counts: Counter[str] = Counter()
    for number, path in enumerate((*files.genbank, *files.labelled)):
        if number < len(files.genbank) or is_genbank(path):
            fasta = scratch / f"genbank_{number + 1}.fa"
            sources[str(fasta)], found = convert_genbank(path, fasta)
            counts += found
        elif table is None:
            raise UsageError(
                f"no labels for {path}: give --labels, or give the file with --viral or --other."
            )
        else:
            sources[path] = table
    return sources, counts


def read_records(sources: Sources, groups: Mapping[str, str], *, kinship: bool) -> RecordTable:
    """Reads all records once and labels them.

    `groups` gives known groups of related records by name; `kinship` also groups similar records, and refuses a sequence that is
    in both classes.
    """
    names: list[str] = []
    classes: list[str] = []
    lengths: list[int] = []
    sketches = KinshipSketches()
    seen: dict[int, int] = {}
    for record in iter_records(list(sources), "dna"):
        class_name = _class_of(sources[record.path], record)
        names.append(record.name)
        classes.append(class_name)
        lengths.append(len(record.sequence))
        if kinship:
            row = seen.setdefault(sketches.add(record.sequence), len(names) - 1)
            if record.sequence and (classes[row] == VIRAL) != (class_name == VIRAL):
                raise InputError(
                    f"the same sequence is labelled viral and nonviral: {names[row] or 'record 1'} ({classes[row]}) and "
                    f"{record.name} ({class_name}, in {record.path}). Remove one of them."
                )
    if groups and not any(name in groups for name in names):
        raise InputError(
            "no record is in the table of --groups: its first column must be the first word of a header."
        )
    class_names = (VIRAL, *sorted(set(classes) - {VIRAL}))
    distinct = [f"g {groups[name]}" if name in groups else f"r {row}" for row, name in enumerate(names, 1)]
    grouped = np.unique(distinct, return_inverse=True)[1].astype(np.int64)
    return RecordTable(
        names=tuple(names),
        classes=np.array(list(map(class_names.index, classes)), np.int64),
        class_names=class_names,
        lengths=np.array(lengths, np.int64),
        groups=join_groups(grouped, sketches.groups()) if kinship else grouped,
    )


def read_table(path: str, *columns: str) -> dict[str, str]:
    """Values by sequence name from a tab- or comma-separated table with the column `seq_name` and one of `columns`.

    Raises:
        InputError: it cannot be read, lacks a column or value, or has conflicting values for a sequence.
    """
    found: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = "\t" if "\t" in file.readline() else ","
            file.seek(0)
            rows = csv.DictReader(file, delimiter=delimiter)
            header = rows.fieldnames or ()
            column = next((name for name in columns if name in header), None)
            if "seq_name" not in header or column is None:
                raise InputError(
                    f"the first line of {path} lacks the columns seq_name (or contig, record, id) and {' or '.join(columns)}, "
                    "separated by tabs or commas: rename its columns."
                )
            for row in rows:
                name, value = row["seq_name"], row[column]
                if not name or not value:
                    raise InputError(
                        f"{path}, line {rows.line_num}: the seq_name or its {column} is missing."
                    )
                if found.setdefault(name, value) != value:
                    raise InputError(f"{path}: {name} has two values of {column}: {found[name]} and {value}.")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table: {error}.") from error
    return found


def _class_of(classes: str | Mapping[str, str], record: Record) -> str:
    if isinstance(classes, str):
        return classes
    if record.name not in classes:
        raise InputError(
            f"record {record.name} of {record.path} has no label: add it to the table, or remove it from the file."
        )
    class_name = classes[record.name]
    return VIRAL if class_name.casefold() in ("viral", "virus", "viruses") else class_name


def is_genbank(path: str) -> bool:
    """Whether a file, compressed or not, begins like GenBank."""
    with reading_text(path) as text:
        return text.peek(6).startswith(b"LOCUS ")


def convert_genbank(genbank: str, fasta: Path) -> tuple[dict[str, str], Counter[str]]:
    """Writes the sequences of a GenBank file as FASTA.

    Returns:
        The class of each record by name; and the numbers of `records`, of those `left_out`, with neither viral nor cellular
        lineage, and of `prophages` cut out.
    """
    classes: dict[str, str] = {}
    counts: Counter[str] = Counter()
    fasta.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(fasta) as new, new.open("w", encoding="utf-8") as sequences:
        for record in _iter_records(genbank):
            counts["records"] += 1
            class_name = _class_in_lineage(record)
            if class_name is None:
                counts["left_out"] += 1
                continue
            regions = () if class_name == VIRAL else _prophages(record)
            counts["prophages"] += len(regions)
            for name, sequence in _pieces(record, regions):
                sequences.write(f">{name}\n{sequence}\n")
                if classes.setdefault(name, class_name) != class_name:
                    raise InputError(f"{genbank}: record {name} occurs twice, with lineages of two classes.")
    if counts["left_out"]:
        _log.warning(
            "%d of %d records of %s skipped: their lineage is neither viral nor cellular",
            counts["left_out"],
            counts["records"],
            visible(genbank),
        )
    return classes, counts


def _iter_records(path: str) -> Iterator[SeqRecord]:
    if not is_genbank(path):
        raise InputError(f"{path} is not GenBank: it does not begin with LOCUS.")
    number = 0
    with (
        reading_text(path) as text,
        io.TextIOWrapper(text, encoding="utf-8") as lines,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", BiopythonParserWarning)
        warnings.filterwarnings("error", "Expected sequence length", BiopythonParserWarning)
        try:
            for record in SeqIO.parse(lines, "genbank"):
                number += 1
                str(record.seq)
                yield record
        except UndefinedSequenceError as error:
            raise InputError(
                f"record {record.id} of {path} has no sequence, only a length. Download it with its sequence "
                '("GenBank (full)").'
            ) from error
        # What Biopython raises or warns of where records are incomplete.
        except (ValueError, AssertionError, LookupError, BiopythonParserWarning) as error:
            raise InputError(f"{path} is damaged GenBank: {error}. Download it again.") from error
    if number == 0:
        raise InputError(f"{path} contains no complete GenBank record. Download it again.")


def _class_in_lineage(record: SeqRecord) -> str | None:
    lineage = cast("list[str]", record.annotations.get("taxonomy", []))
    if "Viruses" in lineage:
        return VIRAL
    return next((name.lower() for name in ("Bacteria", "Archaea", "Eukaryota") if name in lineage), None)


def _prophages(record: SeqRecord) -> tuple[tuple[int, int], ...]:
    """Regions annotated as prophage (0-based, half-open), in order and merged where they overlap or touch."""
    types = ("source", "mobile_element", "misc_feature", "region", "repeat_region")
    qualifiers = ("mobile_element_type", "note", "label", "standard_name", "region_name")
    words = re.compile(r"\b(prophages?|provirus(es)?|proviral)\b", re.IGNORECASE)
    regions: list[tuple[int, int]] = []
    for feature in record.features:
        if feature.location is None or feature.type not in types:
            continue
        described = " ".join(text for name in qualifiers for text in feature.qualifiers.get(name, ()))
        # A source feature spanning the whole record describes the organism ("has two prophages"), not a region.
        is_organism = feature.type == "source" and len(feature.location) == len(record)
        if "proviral" in feature.qualifiers or (not is_organism and words.search(described)):
            regions += [(int(part.start), int(part.end)) for part in feature.location.parts]
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(regions):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def _pieces(record: SeqRecord, regions: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    """Name and bases of what remains of a record without the regions; pieces are named by position, 1-based."""
    sequence = str(record.seq)
    if not regions:
        yield str(record.id), sequence
        return
    begins = [0, *(end for _, end in regions)]
    ends = [*(begin for begin, _ in regions), len(sequence)]
    for begin, end in zip(begins, ends, strict=True):
        if begin < end:
            yield f"{record.id}:{begin + 1}-{end}", sequence[begin:end]
