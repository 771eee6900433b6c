"""How many lanes in a row have failed on a device, in a file between the processes of its lanes and their worker."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from virnuc_core.errors import DeviceLostError, DeviceMemoryError, LaneError
from virnuc_core.files import write_text

MAX_FAILURES: Final = 3
"""Lanes in a row that a device may fail."""
_RUNNING: Final = "running"

_log = logging.getLogger(__name__)


def count_failures(record: Path) -> int | None:
    """Lanes in a row that have failed; None before the first lane."""
    return _read(record)[0]


def settle_failures(record: Path) -> int | None:
    """As `count_failures`, when no lane is at work: one that is said to be was killed, and has failed."""
    failures, is_running = _read(record)
    if failures is not None and is_running:
        failures += 1
        _write(record, str(failures))
    return failures


@contextmanager
def recording_device(record: Path | None) -> Iterator[None]:
    """Counts a lane that the block computes if it fails by the device or if its process is killed."""
    if record is None:
        yield
        return
    before = count_failures(record) or 0
    left = before + 1
    _write(record, f"{before} {_RUNNING}")
    try:
        yield
        left = 0
    except (DeviceLostError, DeviceMemoryError, LaneError):
        raise
    except BaseException:
        left = before
        raise
    finally:
        _write(record, str(left))


def _read(record: Path) -> tuple[int | None, bool]:
    try:
        failures, _, state = record.read_text().partition(" ")
    except FileNotFoundError:
        return None, False
    return int(failures), state == _RUNNING


def _write(record: Path, text: str) -> None:
    try:
        write_text(record, text)
    except OSError as error:
        _log.warning("%s cannot be written (%s): failures of this device are not counted", record, error)
