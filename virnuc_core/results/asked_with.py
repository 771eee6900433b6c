"""Where the settings of a run were given, for its record: known while a command line is at work."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_ORIGINS: ContextVar[Mapping[str, str] | None] = ContextVar("settings_from", default=None)


@contextmanager
def asked_with(origins: Mapping[str, str]) -> Iterator[None]:
    """Runs in the block were asked for with these settings.

    Args:
        origins: flag, variable, or file and section, by setting; without those that nobody gave.
    """
    token = _ORIGINS.set(origins)
    try:
        yield
    finally:
        _ORIGINS.reset(token)


def settings_from() -> dict[str, str] | None:
    """Where each setting that was given came from; None for a run that no command line has asked for."""
    origins = _ORIGINS.get()
    return None if origins is None else dict(origins)
