"""The log file of a lane in a pool, in the run's folder: kept when Prefect's server has forgotten the run, or was away."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from tasks.artifacts import LOGGERS

MAX_BYTES: Final = 1_000_000
# The last one has the errors of tasks, with their tracebacks.
_LOGGERS: Final = (*LOGGERS, "prefect.task_runs")


class _LogFile(RotatingFileHandler):
    """Keeps the newest lines; a lane goes on when they cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Does not write to stderr."""


@contextmanager
def recording_log(path: Path) -> Iterator[None]:
    """Also writes virnuc's log lines to a file, which is cut to its last `MAX_BYTES` to twice as many."""
    handler = _LogFile(path)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
