"""Records whose class is known: where they come from, and their calls beside what they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.stage import stage
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest
from virnuc_core.specs import InputFile
from virnuc_core.training.genbank import GenBankCounts
from virnuc_core.training.labels import (
    LabelledFiles,
    LabelledSource,
    RecordTable,
    open_sources,
    read_records,
    read_table,
)
from virnuc_core.training.metrics import KnownCalls


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """Labelled records, and the files that they come from.

    Attributes:
        files: the files as given, without the table of labels.
        sources: the sequence files to be read.
        table: every record.
        genbank: what was found in GenBank files.
    """

    files: tuple[InputFile, ...]
    sources: tuple[LabelledSource, ...]
    table: RecordTable
    genbank: GenBankCounts

    @property
    def paths(self) -> list[str]:
        """The sequence files, in order."""
        return [source.path for source in self.sources]


@stage
def label(files: LabelledFiles, folder: RunFolder, groups: str | None, *, kinship: bool) -> Labelled:
    """Reads every labelled record once.

    Args:
        files: where the records and their classes are.
        folder: GenBank files are taken apart into it.
        groups: table of records that are known to be related.
        kinship: group records that are alike as well.

    Raises:
        VirnucError: a file cannot be read, a record has no label, or the same sequence is in both classes.
    """
    sources, genbank = open_sources(files, folder.sequences)
    own_groups = None if groups is None else read_table(groups, "group")
    table = read_records(sources, own_groups, kinship=kinship)
    given = (*files.viral, *files.other, *files.genbank, *files.labelled)
    digests = tuple(input_digest(path) for path in given)
    return Labelled(files=digests, sources=sources, table=table, genbank=genbank)


def known_calls(
    is_called: Sequence[bool] | npt.NDArray[np.bool_],
    p_virus: npt.NDArray[np.float64],
    rows: npt.NDArray[np.int64],
    table: RecordTable,
) -> KnownCalls:
    """Calls of n chunks or contigs beside what they are.

    Args:
        is_called: (n,), whether they are called virus.
        p_virus: float64 (n,), NaN where there is no score.
        rows: int64 (n,), rows of their records in the table.
        table: all records.
    """
    return KnownCalls(
        is_viral=table.is_viral[rows],
        is_called=np.asarray(is_called, np.bool_),
        p_virus=p_virus,
        classes=table.classes[rows],
        class_names=table.class_names,
        lengths=table.lengths[rows],
    )
