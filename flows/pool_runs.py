"""Runs that a run has asked the workers of a pool for: submitted, followed, and not left behind."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling

from virnuc_core.errors import UsageError, VirnucError

_SECONDS_BETWEEN_POLLS: Final = 2.0
_SECONDS_BETWEEN_NOTICES: Final = 60.0
_SECONDS_TO_FIRST_NOTICE: Final = 15.0
_POLLS_UNTIL_STOPPED: Final = 30
_MOST_A_REQUEST: Final = 200  # the most that a server gives at once
_UNFINISHED: Final = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")

_log = logging.getLogger(__name__)


class PoolRuns:
    """The runs that are followed; when the block is left by an error, they are cancelled.

    A server that does not answer is waited for: the runs in the pool go on without it.

    Args:
        pool: the work pool that all of them are in, for messages.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._client = get_client(sync_client=True)
        self._unfinished: set[UUID] = set()
        self._next_notice = time.monotonic() + _SECONDS_TO_FIRST_NOTICE

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            if kind is not None:
                self.cancel(self._unfinished)
        finally:
            self._client.__exit__(kind, *details)

    def submit(
        self,
        deployment: str,
        name: str,
        parameters: Mapping[str, Any],
        *,
        tags: Sequence[str] = (),
        delay: float = 0,
    ) -> UUID:
        """Asks for a run, which is shown as a part of the run that asks.

        Args:
            deployment: "flow/deployment".
            name: name of the run until it begins.
            parameters: of the flow.
            tags: by which it can be found.
            delay: seconds until it may begin.
        """
        run = run_deployment(
            deployment,
            parameters=dict(parameters),
            flow_run_name=name,
            tags=tags,
            scheduled_time=datetime.now(UTC) + timedelta(seconds=delay),
            timeout=0,
        )
        run_id = cast(FlowRun, run).id
        self._unfinished.add(run_id)
        return run_id

    def count_workers(self) -> int:
        """Workers of the pool that are online."""
        online = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})
        found = 0
        while True:
            page = self._client.read_workers_for_work_pool(
                self._pool, worker_filter=online, offset=found, limit=_MOST_A_REQUEST
            )
            found += len(page)
            if len(page) < _MOST_A_REQUEST:
                return found

    def find_unfinished(self, tag: str) -> list[FlowRun]:
        """The runs with this tag that are not over, whoever asked for them."""
        found: list[FlowRun] = []
        while True:
            page = self._client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate(
                    {"tags": {"all_": [tag]}, "state": {"type": {"any_": _UNFINISHED}}}
                ),
                limit=_MOST_A_REQUEST,
                offset=len(found),
            )
            found += page
            if len(page) < _MOST_A_REQUEST:
                return found

    def follow(self, run_ids: Iterable[UUID]) -> None:
        """Follows runs that somebody else asked for."""
        self._unfinished.update(run_ids)

    def cancel(self, run_ids: Iterable[UUID]) -> None:
        """Has runs stopped; those at work take a while for it, and what they have finished stays."""
        for run_id in list(run_ids):
            with suppress(httpx.HTTPError, ObjectNotFound):
                self._client.set_flow_run_state(run_id, Cancelling())

    def stop(self, run_ids: Iterable[UUID]) -> None:
        """Has runs of others stopped, and waits until they have, or for a minute."""
        others = set(run_ids)
        self.follow(others)
        self.cancel(others)
        for _ in range(_POLLS_UNTIL_STOPPED):
            if not others & self._unfinished:
                return
            self.wait_for_some()
        _log.warning("%d runs do not stop; going on without them", len(others & self._unfinished))
        self._unfinished -= others

    def wait_for_some(self) -> dict[UUID, State[Any]]:
        """Waits for a moment; gives the final states of the runs that have ended since the last call."""
        time.sleep(_SECONDS_BETWEEN_POLLS)
        try:
            states = self._read_states()
            if time.monotonic() >= self._next_notice:
                self._next_notice = time.monotonic() + _SECONDS_BETWEEN_NOTICES
                self._tell_how_it_stands(states.values())
        except httpx.HTTPError as error:
            if time.monotonic() >= self._next_notice:
                self._next_notice = time.monotonic() + _SECONDS_BETWEEN_NOTICES
                _log.warning("Prefect's server does not answer (%r): waiting for it", error)
            return {}
        ended = {run_id: state for run_id, state in states.items() if state.is_final()}
        self._unfinished -= ended.keys()
        return ended

    def _read_states(self) -> dict[UUID, State[Any]]:
        """The state of every run that is followed; one that was deleted counts as cancelled."""
        ids = sorted(self._unfinished)
        states: dict[UUID, State[Any]] = {
            run_id: Cancelled(message="somebody deleted the run") for run_id in ids
        }
        for begin in range(0, len(ids), _MOST_A_REQUEST):
            wanted = FlowRunFilter.model_validate({"id": {"any_": ids[begin : begin + _MOST_A_REQUEST]}})
            for run in self._client.read_flow_runs(flow_run_filter=wanted, limit=_MOST_A_REQUEST):
                if run.state is not None:
                    states[run.id] = run.state
        return states

    def _tell_how_it_stands(self, states: Iterable[State[Any]]) -> None:
        """Says how many runs are at work and how many wait, and why when there is nobody to do them."""
        counts = Counter(state.name or state.type.value for state in states if not state.is_final())
        if counts:
            counted = ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items()))
            _log.info("work pool %s: %s", self._pool, counted)
        is_waiting = bool(counts) and set(counts) <= {"Scheduled", "Late", "AwaitingRetry"}
        if is_waiting and not self.count_workers():
            _log.warning(
                "%d runs wait, and no worker is online in the work pool %s: start `virnuc worker` on a machine "
                "with a GPU that sees the run's folder",
                counts.total(),
                self._pool,
            )


def require_lasting_server() -> str:
    """The address of the server in the user's settings.

    Raises:
        UsageError: there is none.
    """
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "mode pool needs a Prefect server that outlives this run: run `virnuc up` and set PREFECT_API_URL to the "
            "address that it prints, or choose mode local."
        )
    return url


def require_deployments(names: Iterable[str]) -> None:
    """Makes sure that runs can be asked for.

    Raises:
        UsageError: there is no lasting server, or it does not have these deployments.
        VirnucError: the server does not answer.
    """
    url = require_lasting_server()
    with get_client(sync_client=True) as client:
        for name in names:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound as error:
                raise UsageError(
                    f"the Prefect server at {url} has no deployment {name}: run `virnuc deploy` against it."
                ) from error
            except httpx.HTTPError as error:
                raise VirnucError(
                    f"the Prefect server at {url} does not answer ({error!r}): start it, or set PREFECT_API_URL."
                ) from error
