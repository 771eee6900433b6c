"""Which errors a retry can mend, and docs/cli.md, which lists every error with its exit code."""

import errno
import pickle
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from virnuc_core.errors import DeviceMemoryError, InputError, LaneError, VirnucError, is_retryable

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.parametrize(
    ("error", "can_help"),
    [
        (LaneError("the process died"), True),
        (DeviceMemoryError("full"), True),
        (InputError("no such file"), False),
        (VirnucError("unknown"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError("without a number"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_can_be_tried_again(error: BaseException, can_help: bool) -> None:
    assert is_retryable(error) is can_help
    assert is_retryable(pickle.loads(pickle.dumps(error))) is can_help


def test_every_error_is_on_the_page() -> None:
    def kinds(kind: type[VirnucError]) -> Iterable[type[VirnucError]]:
        yield kind
        for below in kind.__subclasses__():
            yield from kinds(below)

    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| .* \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    own = {kind for kind in kinds(VirnucError) if kind.__module__ == VirnucError.__module__}
    expected = [(kind.__name__, str(kind.exit_code), "yes" if kind.retryable else "no") for kind in own]
    assert sorted(rows) == sorted(expected)
