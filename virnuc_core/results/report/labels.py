"""Which class each contig belongs to, as a person knows it: for figures by class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from virnuc_core.errors import InputError
from virnuc_core.plain_text import cell_text, plain_name

UNLABELLED: Final = "(no label)"
MAX_CLASSES: Final = 200
_HEADERS: Final = frozenset({"contig", "contig_id", "id", "name", "sequence", "record"})


def read_labels(path: Path) -> Mapping[str, str]:
    """The class of each contig by its name.

    Args:
        path: tab-separated: contig, class; further columns, empty lines, comments after # and a first line that names the
            columns are passed over. Names are taken as they are in the FASTA or as virnuc writes them.

    Raises:
        InputError: a line has no class, a contig has two, there are more than `MAX_CLASSES` classes, or it is no text.
        OSError: it cannot be read.
    """
    labels: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or line.startswith("#"):
                    continue
                cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
                if len(cells) < 2 or not cells[0] or not cells[1]:
                    raise InputError(
                        f"{path}, line {number}: {line.strip()!r:.60} is not a contig, a tab and its class."
                    )
                if not labels and cells[0].lower() in _HEADERS:
                    continue
                name, label = plain_name(cells[0].split()[0]), cell_text(cells[1])
                if labels.setdefault(name, label) != label:
                    raise InputError(
                        f"{path}, line {number}: {name} is {label!r:.40} here and {labels[name]!r:.40} before. "
                        "Give each contig one class."
                    )
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: give a tab-separated table.") from error
    if not labels:
        raise InputError(f"{path} labels nothing: give lines of a contig, a tab and its class.")
    if len(classes := set(labels.values())) > MAX_CLASSES:
        raise InputError(
            f"{path} has {len(classes):,} classes, the report shows at most {MAX_CLASSES}: is the second column the class?"
        )
    return labels
