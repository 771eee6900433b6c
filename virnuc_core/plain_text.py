"""Text from foreign files in a form that can do no harm in tables, logs and terminals."""

import re
from typing import Final
from unicodedata import category

LONGEST_NAME: Final = 1000  # bytes

# Control, format (those that turn the direction of writing among them) and separator characters, lone surrogates.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# What a spreadsheet takes for the begin of a formula, in the wide forms of East Asia too, and the quotes that make
# readers of tables look for the end of a cell rows further on: at the begin of the text, and after a comma or a semicolon,
# at which spreadsheets split a .csv by default, tab-separated or not.
_CELL_START: Final = re.compile("(?:^|(?<=[,;]))[-=+@\uff1d\uff0b\uff0d\uff20\"']")


def visible(text: str) -> str:
    """The text with every character that cannot be seen as `%XX`, one for each byte of its UTF-8; line ends stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(c) if category(c) in _UNSEEN and c != "\n" else c for c in text)


def cell_text(text: str) -> str:
    """One line that a spreadsheet shows as it is: no unseen characters, and no part of it begins a formula or a quote."""
    plain = visible(text).replace("\n", "%0A")
    return _CELL_START.sub(lambda found: _escaped(found[0]), plain)


def plain_name(name: str) -> str:
    """A name of a record as virnuc writes it everywhere: as `cell_text`, and cut after LONGEST_NAME bytes."""
    if name.isprintable() and not _CELL_START.search(name) and 4 * len(name) <= LONGEST_NAME:
        return name
    return cell_text(name).encode()[:LONGEST_NAME].decode(errors="ignore")


def _escaped(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
