"""The report as one HTML file: style, script and data inside, and nothing that a browser would fetch."""

import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, TextIO

from virnuc_core.files import atomic_path
from virnuc_core.results.report.gather import DEFAULT_LIMITS, ReportLimits, gather
from virnuc_core.run_folder import RunFolder

_PACKAGE: Final = "virnuc_core.results.report"
_SCRIPTS: Final = ("data.js", "charts.js", "track.js", "table.js", "page.js")
_MARK: Final = re.compile(r"\{\{(\w+)\}\}")
# What would end the script element, or be taken for markup; in JSON these stand only in strings.
_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_report_page(
    folder: RunFolder,
    document: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
    limits: ReportLimits = DEFAULT_LIMITS,
) -> None:
    """Writes report.html from the tables of a run, atomically.

    Args:
        folder: the run's folder, with its tables.
        document: the content of its run.json.
        labels: class of contigs by name, for figures by class.
        limits: how much of a large run is in it.

    Raises:
        DamagedFileError: a table or the document is not as virnuc writes it.
        OSError: a file cannot be read or written.
    """
    data = gather(folder, document, labels, limits)
    before, after = _page(data.verdict, data.facts.out)
    with atomic_path(folder.page) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(before)
        write_json(data.document, file)
        file.write(after)


def write_json(document: Mapping[str, Any], file: TextIO) -> None:
    """Writes JSON that may stand in a script element, whatever its strings hold; nothing but ASCII."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    file.write(text)


def _page(verdict: str, out: str) -> tuple[str, str]:
    """The file, before and after its data.

    The policy lets a browser run this one script, apply this one style sheet, and fetch nothing.
    """
    style = _source("style.css")
    script = "\n".join(['"use strict";', "(() => {", *(_source(name) for name in _SCRIPTS), "})();"])
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    name = out.rstrip("/").rpartition("/")[2] or "run"
    values = {
        "policy": policy,
        "title": html.escape(f"{name}: virnuc report"),
        "verdict": html.escape(verdict),
        "style": style,
        "script": script,
    }
    before, _, after = _source("template.html").partition("{{data}}")
    fill = partial(_MARK.sub, lambda mark: values[mark[1]])
    return fill(before), fill(after)


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _source(name: str) -> str:
    return files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")
