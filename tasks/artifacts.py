"""Artifacts and log lines on a flow run's page in Prefect; all best effort, and nothing outside of a flow.

Prefect is imported in a flow alone: a run without one does not wait for it.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast
from uuid import UUID

from virnuc_core.plain_text import hide_secrets_in_logs
from virnuc_core.with_parent import end_with_parent

# Of every run that somebody asked for; automations.yaml goes by it.
RUN_TAG: Final = "virnuc"
LOGGERS: Final = ("virnuc_core", "tasks", "flows")
# More frequent updates load the server for no visible gain.
SECONDS_BETWEEN_UPDATES: Final = 5.0
SECONDS_BETWEEN_TRIALS: Final = 60.0

_log = logging.getLogger(__name__)


def in_flow() -> bool:
    """Whether this is within a run of a flow; does not import Prefect."""
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None


def is_deployed() -> bool:
    """Whether this is a run of a deployment."""
    if not in_flow():
        return False
    from prefect.runtime import deployment

    return deployment.id is not None


def begin_flow() -> None:
    """What every flow does first: its log is from INFO on and without secrets, and a deployed one ends with its worker."""
    hide_secrets_in_logs()
    log_from_info()
    if is_deployed():
        end_with_parent()


def log_from_info() -> None:
    """Lets virnuc's log lines from INFO on reach the handlers, unless more do."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)


class ProgressArtifact:
    """A progress bar on the page of the current run; the key consists of lower-case letters, digits and dashes."""

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._id: UUID | None = None
        self._next_update = 0.0
        self.update(0.0)

    def update(self, percent: float) -> None:
        """Sets the bar to `percent` (0 to 100), unless it was just set or the server has just failed."""
        if not in_flow():
            return
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        if time.monotonic() < self._next_update and (percent < 100 or self._id is None):
            return
        # Prefect would retry for a minute and block the caller.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            is_sent = _best_effort(lambda: self._send(percent))
        pause = SECONDS_BETWEEN_UPDATES if is_sent else SECONDS_BETWEEN_TRIALS
        self._next_update = time.monotonic() + pause

    def _send(self, percent: float) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._id is None:
            # A coroutine only for callers that are coroutines themselves.
            self._id = cast(UUID, create_progress_artifact(percent, self._key, self._description))
        else:
            update_progress_artifact(self._id, percent)


def show_table(key: str, rows: Sequence[Mapping[str, object]], description: str | None = None) -> None:
    """Shows a table; what a row lacks is empty."""
    if in_flow():
        from prefect.artifacts import create_table_artifact

        columns = dict.fromkeys(name for row in rows for name in row)
        filled = [{name: row.get(name, "") for name in columns} for row in rows]
        _best_effort(lambda: create_table_artifact(filled, key, description))


def show_markdown(key: str, markdown: str, description: str | None = None) -> None:
    if in_flow():
        from prefect.artifacts import create_markdown_artifact

        _best_effort(lambda: create_markdown_artifact(markdown, key, description))


def show_link(key: str, link: str, text: str) -> None:
    if in_flow():
        from prefect.artifacts import create_link_artifact

        _best_effort(lambda: create_link_artifact(link, text, key, text))


def _best_effort(send: Callable[[], object]) -> bool:
    """Returns whether it worked; a server failure is only logged."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    try:
        send()
    except (HTTPError, PrefectException, OSError) as error:
        _log.warning("the Prefect server rejected an artifact (%s): the run continues without it", error)
        return False
    return True
