"""docs/errors.md lists every error with its exit code."""

import re
from collections.abc import Iterable
from pathlib import Path

from virnuc_core.errors import VirnucError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def kinds(kind: type[VirnucError]) -> Iterable[type[VirnucError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


def test_every_error_is_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .* \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    own = {kind for kind in kinds(VirnucError) if kind.__module__ == VirnucError.__module__}
    expected = {(kind.__name__, str(kind.exit_code), "yes" if kind.retryable else "no") for kind in own}
    assert set(rows) == expected
    assert len(rows) == len(expected)
