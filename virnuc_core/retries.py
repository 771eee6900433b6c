"""Repeats what may succeed later: storage that is away, a device or a process that failed."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Final, TypeVar

from virnuc_core.errors import StorageLostError, VirnucError, is_retryable, storage_error

R = TypeVar("R")

# All of them for storage that is away, the first three for other errors that may go away.
DELAYS_SECONDS: Final = (2.0, 10.0, *[60.0] * 10)

_log = logging.getLogger(__name__)


def retrying(name: str, call: Callable[[], R], stopping: Event | None = None) -> R:
    """Calls a function that finds finished work on disk, again after transient errors: for 10 minutes while storage is away.

    Nothing is repeated once `stopping` is set, which also ends a wait.

    Raises:
        StorageError: an OSError of the last call.
        Exception: any other error of the last call.
    """
    stopping = stopping or Event()
    tries = 0
    while True:
        tries += 1
        try:
            with translate_os_errors():
                return call()
        except VirnucError as error:
            is_over = stopping.is_set() or not is_repeated(name, error, tries)
            if is_over or stopping.wait(DELAYS_SECONDS[tries - 1]):
                raise


def is_repeated(name: str, error: BaseException, tries: int) -> bool:
    """Whether a call that failed for the `tries`-th time is made again; says so."""
    most = len(DELAYS_SECONDS) if isinstance(error, StorageLostError) else 3
    if not is_retryable(error) or tries > most:
        return False
    _log.warning("retrying %s in %.0f s: %s", name, DELAYS_SECONDS[tries - 1], error)
    return True


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Translates OSErrors of the block into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error
