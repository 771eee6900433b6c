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

LOGGERS: Final = ("virnuc_core", "tasks", "flows")
# More updates of a progress bar cost the server more than they tell a person.
SECONDS_BETWEEN_UPDATES: Final = 5.0
SECONDS_BETWEEN_TRIALS: Final = 60.0

_log = logging.getLogger(__name__)


def attach_api_log_handler() -> None:
    """Sends what virnuc logs, from INFO on, to the page of its flow run; may be called again.

    A terminal shows no more than before, since the handlers there have levels of their own.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        # A worker's run has one already, by PREFECT_LOGGING_EXTRA_LOGGERS.
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            # Prefect would warn of every line that belongs to no run.
            handler.addFilter(lambda record: bool(FlowRunContext.get() or TaskRunContext.get()))
            logger.addHandler(handler)


class ProgressArtifact:
    """A progress bar on the page of the run that creates it; the key has lower case letters, digits and dashes."""

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._id: UUID | None = None
        self._next_update = 0.0
        self._works = True
        self.update(0.0)

    def update(self, percent: float) -> None:
        """Sets the bar to `percent` (0 to 100), unless it was set, or the server has failed, just now."""
        if time.monotonic() < self._next_update and (percent < 100 or self._id is None):
            return
        # Prefect would retry for a minute, and whoever updates the bar has work to do.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            level = logging.WARNING if self._works else logging.DEBUG
            self._works = _best_effort(lambda: self._send(percent), level)
        pause = SECONDS_BETWEEN_UPDATES if self._works else SECONDS_BETWEEN_TRIALS
        self._next_update = time.monotonic() + pause

    def _send(self, percent: float) -> None:
        if self._id is None:
            # A coroutine only for callers that are coroutines themselves.
            self._id = cast(UUID, create_progress_artifact(percent, self._key, self._description))
        else:
            update_progress_artifact(self._id, percent)


def show_table(key: str, rows: Sequence[Mapping[str, object]], description: str | None = None) -> None:
    """Shows a table, one row a mapping, all with the same keys."""
    _best_effort(lambda: create_table_artifact([dict(row) for row in rows], key, description))


def show_markdown(key: str, markdown: str, description: str | None = None) -> None:
    """Shows formatted text."""
    _best_effort(lambda: create_markdown_artifact(markdown, key, description))


def show_link(key: str, link: str, text: str) -> None:
    """Shows a link to another page."""
    _best_effort(lambda: create_link_artifact(link, text, key, text))


def add_run_tag(tag: str) -> None:
    """Adds a tag to the flow run."""
    if flow_run.id is not None and tag not in flow_run.tags:
        tags = [*flow_run.tags, tag]
        _best_effort(lambda: get_client(sync_client=True).update_flow_run(UUID(flow_run.id), tags=tags))


def _best_effort(send: Callable[[], object], level: int = logging.WARNING) -> bool:
    """Whether it worked; a failure of the server is logged at `level`, and is no reason to stop."""
    try:
        send()
    except (HTTPError, PrefectException, OSError) as error:
        _log.log(level, "Prefect's server takes no artifact (%s): the run goes on without it", error)
        return False
    return True
