"""Provenance of a run's settings, for its record; known only while a command line runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_ORIGINS: ContextVar[Mapping[str, str] | None] = ContextVar("settings_from", default=None)


@contextmanager
def asked_with(origins: Mapping[str, str]) -> Iterator[None]:
    """Records, for runs in the block, where each setting comes from: its flag, variable, or file and section."""
    token = _ORIGINS.set(origins)
    try:
        yield
    finally:
        _ORIGINS.reset(token)


def settings_from() -> dict[str, str] | None:
    """Where each explicitly given setting comes from; None unless the run was started from a command line."""
    origins = _ORIGINS.get()
    return None if origins is None else dict(origins)
