"""virnuc's own log lines on the page of the flow run that logs them."""

import logging
from typing import Final

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

LOGGERS: Final = ("virnuc_core", "tasks", "flows")


def show_core_logs() -> None:
    """Sends what virnuc logs, from INFO on, to Prefect; may be called again.

    A terminal shows no more than before, since the handlers there have levels of their own.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        # A process that Prefect's own settings have told of these loggers has a handler already.
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            handler.addFilter(_is_in_a_run)
            logger.addHandler(handler)


def _is_in_a_run(record: logging.LogRecord) -> bool:
    """Whether there is a run for the line to go to; Prefect would warn of every line that has none."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
