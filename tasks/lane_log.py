"""The log file of a lane, in the run's folder: kept when Prefect's server has forgotten the run, or was away."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from tasks.artifacts import LOGGERS

MAX_BYTES: Final = 1_000_000
# The last one has the errors of tasks, with their tracebacks.
_LOGGERS: Final = (*LOGGERS, "prefect.task_runs")


# The log of the enclosing lane: lanes of a local run are threads of one process.
_current: ContextVar["_LogFile | None"] = ContextVar("lane_log", default=None)


class _LogFile(RotatingFileHandler):
    """Keeps the newest lines of one lane; a lane goes on when they cannot be written."""

    def __init__(self, path: Path, *, alone: bool) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        if not alone:
            self.addFilter(lambda record: _current.get() is self)

    def handleError(self, record: logging.LogRecord) -> None:
        """Does not write to stderr."""


@contextmanager
def recording_log(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Also writes the log lines of this lane to a file, which is cut to its last `MAX_BYTES` to twice as many.

    A lane is `alone` that computes in threads of this process: all lines are its own.
    """
    handler = _LogFile(path, alone=alone)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    token = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(token)
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
