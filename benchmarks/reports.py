"""Output of benchmark reports."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def print_and_write(report: Mapping[str, Any], path: Path) -> None:
    """Prints a report as JSON and writes it to a file, creating its folder."""
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
