"""Builds the report as one HTML file with style, script and data embedded, so that a browser fetches nothing."""

import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

from virnuc_core.files import write_text
from virnuc_core.results.report.data import Limits, gather
from virnuc_core.run_folder import RunFolder

_SCRIPTS: Final = ("data.js", "charts.js", "track.js", "table.js", "page.js")
_MARK: Final = re.compile(r"\{\{(\w+)\}\}")
# Could end the script element or be taken for markup; in JSON these occur only in strings.
_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_report_page(folder: RunFolder, document: Mapping[str, Any], limits: Limits | None = None) -> None:
    """Writes report.html from run.json's content and the tables of a run, atomically.

    The content security policy lets a browser run only this script, apply only this style sheet, and fetch nothing.

    Raises:
        OSError: a file cannot be read or written.
    """
    data = gather(folder, document, limits)
    style = _source("style.css")
    script = "\n".join(['"use strict";', "(() => {", *map(_source, _SCRIPTS), "})();"])
    name = data["run"]["out"].rstrip("/").rpartition("/")[2] or "run"
    values = {
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
        "title": html.escape(f"{name}: virnuc report"),
        "headline": html.escape(data["headline"]),
        "style": style,
        "script": script,
        "data": script_json(data),
    }
    # In one pass, so that marks in filled-in text are not replaced.
    write_text(folder.page, _MARK.sub(lambda mark: values[mark[1]], _source("template.html")))


def script_json(document: Mapping[str, Any]) -> str:
    """ASCII-only JSON that is safe in a script element, whatever its strings hold."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _source(name: str) -> str:
    return files("virnuc_core.results.report").joinpath(name).read_text(encoding="utf-8")
