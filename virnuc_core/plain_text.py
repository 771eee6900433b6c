"""Sanitises untrusted text for tables, logs and terminals."""

import logging
import re
from contextlib import suppress
from traceback import format_exception
from typing import Any, Final
from unicodedata import category

LONGEST_NAME: Final = 1000  # bytes

# Scheme, user and password, place, and what follows "?", where a signature or a token may be. A password may hold any sign:
# SQLAlchemy takes a slash. After the host of a web server, though, a colon and digits are its port.
_URL: Final = re.compile(
    r"""(?P<scheme>(?:(?P<web>https?)|[a-z][a-z0-9+.-]*)://)
    (?:[^\s/?#'"]*@ | [^\s:/?#'"]*:(?(web)(?!\d{1,5}/))[^\s'"@]*@)?
    (?P<place>[^\s?'"]*)(?P<query>\?[^\s'")>]+)?""",
    re.IGNORECASE | re.VERBOSE,
)

# Characters that start a formula in a spreadsheet, full-width forms included, or a quoted cell; also after a comma or
# semicolon, where spreadsheets split a .csv even if it is tab-separated.
_CELL_START: Final = re.compile("(?:^|(?<=[,;]))[-=+@\uff1d\uff0b\uff0d\uff20\"']")


def visible(text: str) -> str:
    """Percent-encodes the UTF-8 bytes of every invisible character except line feeds."""
    if text.isprintable():
        return text
    # Control, format (including bidirectional), surrogate and separator characters.
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(_escaped(c) if category(c) in unseen and c != "\n" else c for c in text)


def without_secrets(text: str) -> str:
    """Leaves out the user, password and query string of every URL in a text."""
    if "://" not in text:
        return text
    return _URL.sub(lambda url: f"{url['scheme']}{url['place']}{'?...' if url['query'] else ''}", text)


def hide_secrets_in_logs() -> None:
    """From now on leaves them out of every log line of this process, whoever writes it, and of its traceback."""
    make_record = logging.getLogRecordFactory()
    if getattr(make_record, "hides_secrets", False):
        return

    def make_plain(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        with suppress(TypeError, ValueError):  # values that do not fit: the handler reports it
            if "://" in (text := record.getMessage()):
                record.msg, record.args = without_secrets(text), ()
        if record.exc_info and record.exc_info[1]:
            record.exc_text = without_secrets("".join(format_exception(record.exc_info[1])).rstrip())
        return record

    make_plain.hides_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_plain)


def cell_text(text: str) -> str:
    """As `visible`, on one line, with characters escaped that start a formula or quote in a spreadsheet."""
    plain = visible(text).replace("\n", "%0A")
    return _CELL_START.sub(lambda found: _escaped(found[0]), plain)


def plain_name(name: str) -> str:
    """A record name as written in all outputs: `cell_text`, truncated to LONGEST_NAME bytes."""
    if name.isprintable() and not _CELL_START.search(name) and 4 * len(name) <= LONGEST_NAME:
        return name
    return cell_text(name).encode()[:LONGEST_NAME].decode(errors="ignore")


def _escaped(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
