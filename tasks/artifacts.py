"""What a flow run shows on its page in Prefect: artifacts, tags and log lines. None of them ever fails a run."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast
from uuid import UUID

from httpx import HTTPError
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

_log = logging.getLogger(__name__)


LOGGERS: Final = ("virnuc_core", "tasks", "flows")


def attach_api_log_handler() -> None:
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


# A bar that moves more often costs the server more than it tells a person.
SECONDS_BETWEEN_UPDATES: Final = 5.0
SECONDS_BETWEEN_TRIALS: Final = 60.0


class ProgressArtifact:
    """A bar on the page of the run that makes it.

    Args:
        key: name in the list of artifacts: lower case letters, digits and dashes.
        description: what it is the progress of.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._id: UUID | None = None
        self._not_before = 0.0
        self._works = True
        self.update(0.0)

    def update(self, percent: float) -> None:
        """Moves the bar to `percent` (0 to 100), unless it has been moved, or the server has failed, just now."""
        if time.monotonic() < self._not_before and (percent < 100 or self._id is None):
            return
        # Prefect would try for a minute, and whoever moves the bar has work to do.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            self._works = _show(
                lambda: self._send(percent), level=logging.WARNING if self._works else logging.DEBUG
            )
        pause = SECONDS_BETWEEN_UPDATES if self._works else SECONDS_BETWEEN_TRIALS
        self._not_before = time.monotonic() + pause

    def _send(self, percent: float) -> None:
        if self._id is None:
            # A coroutine only for callers that are coroutines themselves.
            self._id = cast(UUID, create_progress_artifact(percent, self._key, self._description))
        else:
            update_progress_artifact(self._id, percent)


def show_table(key: str, rows: Sequence[Mapping[str, object]], description: str | None = None) -> None:
    """Shows a table, one row a mapping, all with the same keys."""
    _show(lambda: create_table_artifact([dict(row) for row in rows], key, description))


def show_markdown(key: str, markdown: str, description: str | None = None) -> None:
    """Shows formatted text."""
    _show(lambda: create_markdown_artifact(markdown, key, description))


def show_link(key: str, link: str, text: str) -> None:
    """Shows a link to another page."""
    _show(lambda: create_link_artifact(link, text, key, text))


def add_run_tag(tag: str) -> None:
    """Adds a tag to the flow run."""

    def add() -> None:
        client = get_client(sync_client=True)
        client.update_flow_run(UUID(flow_run.id), tags=[*flow_run.tags, tag])

    if flow_run.id is not None and tag not in flow_run.tags:
        _show(add)


def _show(show: Callable[[], object], level: int = logging.WARNING) -> bool:
    """Whether it worked; a server that does not take it is told of at `level`, and is no reason to stop."""
    try:
        show()
    except (HTTPError, PrefectException, OSError) as error:
        _log.log(level, "Prefect's server takes no artifact (%s): the run goes on without it", error)
        return False
    return True
