"""Runs in a work pool: submitted, followed and cancelled at a server that may be away for a while."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Self, TypeVar, cast
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentFlowRunCreate
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import get_settings_context
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed, Pending, Scheduled, to_state_create

from virnuc_core.errors import VirnucError

ONLINE: Final = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})

_SECONDS_BETWEEN_POLLS: Final = 2.0
_SECONDS_BETWEEN_NOTICES: Final = 60.0
_SECONDS_TO_FIRST_NOTICE: Final = 15.0
# A process of a lane needs seconds to start. Cancelling, a worker kills it after 30.
_SECONDS_PENDING: Final = 300.0
_SECONDS_CANCELLING: Final = 60.0
# A gap between two answers of the server after which time counts anew: workers could not reach it either.
_SECONDS_AWAY: Final = 30.0
# The server's maxima.
_PAGE_SIZE: Final = 200
_MOST_SUBMITTED: Final = 100
_MOST_CANCELLED: Final = 50
_BULK_TRIES: Final = 3
_UNFINISHED: Final = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
_AT_WORK: Final = (StateType.PENDING, StateType.RUNNING)
_TO_BE_TRIED_AGAIN: Final = (408, 429)

Answer = TypeVar("Answer")
Item = TypeVar("Item")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRun:
    """A run to submit.

    Attributes:
        key: no second run is made with the same one.
        timeout: seconds that it may run without progress.
        delay: seconds until it may start.
    """

    key: str
    name: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    timeout: float = math.inf
    delay: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Followed:
    """An unfinished run: its state and since when (or its last progress), and why it is being ended, if so."""

    timeout: float
    state: StateType = StateType.SCHEDULED
    since: float = 0.0
    reason: str | None = None

    @property
    def limit(self) -> float:
        """Seconds that it may stay as it is."""
        if self.state == StateType.RUNNING:
            return self.timeout
        limits = {StateType.PENDING: _SECONDS_PENDING, StateType.CANCELLING: _SECONDS_CANCELLING}
        return limits.get(self.state, math.inf)


class PoolRuns:
    """Runs of a deployment, children of the current one; when the block is left by an error, they are cancelled.

    A server that does not answer is waited for: what is at work in the pool continues without it.
    """

    def __init__(self, pool: str, deployment: str, queue: str) -> None:
        self._pool, self._deployment, self._queue = pool, deployment, queue
        self._client = get_client(sync_client=True)
        # Prefect would try again for a minute, in silence.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            self._without_retries = get_settings_context()
        self._followed: dict[UUID, _Followed] = {}
        self._in_flight: Sequence[PoolRun] = ()  # whose submission has begun, and may have been interrupted
        self._last_poll = time.monotonic()
        self._next_notice = self._last_poll + _SECONDS_TO_FIRST_NOTICE

    def __enter__(self) -> Self:
        self._client.__enter__()
        self._deployment_id = self._ask(lambda: self._client.read_deployment_by_name(self._deployment).id)
        # The parent of all runs, by which they are shown as children of the current one.
        self._parent_id = self._ask(self._make_parent)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            if kind is not None:
                self._cancel_all()
        finally:
            self._client.__exit__(kind, *details)

    @property
    def num_at_work(self) -> int:
        """Runs that a worker had taken at the last poll."""
        return sum(run.state in _AT_WORK for run in self._followed.values())

    @property
    def num_waiting(self) -> int:
        """Runs that no worker had taken at the last poll."""
        return sum(run.state == StateType.SCHEDULED for run in self._followed.values())

    def submit(self, runs: Sequence[PoolRun]) -> list[UUID]:
        """Submits runs, up to a hundred with one request."""
        ids: list[UUID] = []
        for batch in _batches(runs, _MOST_SUBMITTED):
            self._in_flight = batch
            made = self._create(batch)
            for run_id, run in zip(made, batch, strict=True):
                self._followed[run_id] = _Followed(timeout=run.timeout)
            self._in_flight = ()
            ids += made
        return ids

    def find_unfinished(self, tag: str) -> list[FlowRun]:
        """Unfinished runs of this deployment with a tag, whoever submitted them."""
        wanted = FlowRunFilter.model_validate(
            {
                "tags": {"all_": [tag]},
                "deployment_id": {"any_": [self._deployment_id]},
                "state": {"type": {"any_": _UNFINISHED}},
            }
        )
        read = partial(self._client.read_flow_runs, flow_run_filter=wanted)
        return read_pages(lambda **page: self._ask(partial(read, **page)))

    def find_newest(self, tag: str) -> FlowRun | None:
        """The run with this tag that was submitted last."""
        wanted = FlowRunFilter.model_validate({"tags": {"all_": [tag]}})
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
        read = partial(self._client.read_flow_runs, flow_run_filter=wanted, sort=newest_first, limit=1)
        return next(iter(self._ask(read)), None)

    def count_workers(self) -> int:
        """Online workers of the pool, up to 200."""
        read = self._client.read_workers_for_work_pool
        return len(self._ask(lambda: read(self._pool, worker_filter=ONLINE)))

    def follow(self, run: FlowRun, timeout: float = math.inf) -> None:
        """Also polls a run submitted by an earlier attempt."""
        state = run.state_type or StateType.SCHEDULED
        self._followed[run.id] = _Followed(timeout=timeout, state=state, since=time.monotonic())

    def leave(self, run_ids: Iterable[UUID]) -> None:
        """Polls and cancels these runs no longer."""
        for run_id in run_ids:
            self._followed.pop(run_id, None)

    def touch(self, run_id: UUID) -> None:
        """A run makes progress."""
        if run_id in self._followed:
            self._followed[run_id] = replace(self._followed[run_id], since=time.monotonic())

    def poll(self) -> dict[UUID, State[Any]]:
        """Sleeps for one interval; returns the final states of runs that have ended since the last call."""
        time.sleep(_SECONDS_BETWEEN_POLLS)
        states = self._read_states()
        now = time.monotonic()
        gap, self._last_poll = now - self._last_poll, now
        for run_id, state in states.items():
            run = self._followed[run_id]
            if state.type != run.state or gap > _SECONDS_AWAY:
                self._followed[run_id] = replace(run, state=state.type, since=now)
        if now >= self._next_notice:
            self._next_notice = now + _SECONDS_BETWEEN_NOTICES
            self._log_status(states.values())
        ended: dict[UUID, State[Any]] = {}
        for run_id, state in states.items():
            if state.is_final():
                reason = self._followed.pop(run_id).reason
                ended[run_id] = Crashed(message=reason) if reason and not state.is_completed() else state
        return ended

    def end_overdue(self) -> None:
        """Cancels runs without progress, and runs that do not start; those that do not stop are Crashed by force.

        Call it after every poll, when all progress is known.
        """
        now = time.monotonic()
        late = {run_id: run for run_id, run in self._followed.items() if now - run.since > run.limit}
        stuck = [run_id for run_id, run in late.items() if run.state == StateType.CANCELLING]
        for run_id in late.keys() - stuck:
            what = "does not start" if late[run_id].state == StateType.PENDING else "hangs"
            reason = f"it {what}: no progress for {late[run_id].limit:.0f} s"
            self._followed[run_id] = replace(late[run_id], reason=reason)
            _log.warning("run %s is cancelled: %s", run_id, reason)
        self.cancel(late.keys() - stuck)
        self._set_state(stuck, Crashed(message="it did not stop when it was cancelled"), force=True)

    def stop(self, runs: Sequence[FlowRun]) -> None:
        """Cancels runs of an earlier attempt, and waits until they have ended."""
        for run in runs:
            self.follow(run)
        others = {run.id for run in runs}
        self.cancel(others)
        while others & self._followed.keys():
            self.poll()
            self.end_overdue()

    def cancel(self, run_ids: Iterable[UUID]) -> None:
        """Cancels runs, fifty with one request; those at work take a while to stop and keep what is finished."""
        self._set_state(run_ids, Cancelling(), force=False)

    def _cancel_all(self) -> None:
        try:
            # By their keys, the server names those that it has made already.
            self.submit(self._in_flight)
        finally:
            self.cancel(self._followed)

    def _set_state(self, run_ids: Iterable[UUID], state: State[Any], *, force: bool) -> None:
        wanted = to_state_create(state).model_dump(mode="json", exclude_unset=True)
        for batch in _batches(list(run_ids), _MOST_CANCELLED):
            chosen = {"id": {"any_": [str(run_id) for run_id in batch]}}
            self._post("/flow_runs/bulk_set_state", {"flow_runs": chosen, "state": wanted, "force": force})

    def _create(self, runs: Sequence[PoolRun]) -> list[UUID]:
        """Makes runs with one request; one by one if the server's database is busy again and again."""
        now, path = datetime.now(UTC), f"/deployments/{self._deployment_id}/create_flow_run"
        wanted = [
            DeploymentFlowRunCreate(
                name=run.name,
                parameters=dict(run.parameters),
                tags=list(run.tags),
                idempotency_key=run.key,
                state=to_state_create(Scheduled(scheduled_time=now + timedelta(seconds=run.delay))),
                parent_task_run_id=self._parent_id,
                work_queue_name=self._queue,
            ).model_dump(mode="json", exclude_unset=True)
            for run in runs
        ]
        for _ in range(_BULK_TRIES):
            made = self._post(f"{path}/bulk", wanted)["results"]
            if all(result["status"] == "CREATED" for result in made):
                return [UUID(result["flow_run_id"]) for result in made]
            time.sleep(_SECONDS_BETWEEN_POLLS)
        return [UUID(self._post(path, run)["id"]) for run in wanted]

    def _make_parent(self) -> UUID:
        task = Task(lambda: None, name=self._deployment)
        task.task_key = f"virnuc.{self._deployment}"
        attempt = str(flow_run.run_count)
        return self._client.create_task_run(task, UUID(flow_run.id), attempt, state=Pending()).id

    def _read_states(self) -> dict[UUID, State[Any]]:
        """The state of every run; a deleted one counts as cancelled."""
        states: dict[UUID, State[Any]] = {
            run_id: Cancelled(message="somebody deleted the run") for run_id in self._followed
        }
        for batch in _batches(list(self._followed), _PAGE_SIZE):
            wanted = FlowRunFilter.model_validate({"id": {"any_": batch}})
            read = partial(self._client.read_flow_runs, flow_run_filter=wanted, limit=_PAGE_SIZE)
            for run in self._ask(read):
                if run.state is not None:
                    states[run.id] = run.state
        return states

    def _log_status(self, states: Iterable[State[Any]]) -> None:
        """Also warns when no worker is online."""
        counts = Counter(state.name or state.type.value for state in states if not state.is_final())
        if counts:
            counted = ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items()))
            _log.info("work pool %s: %s", self._pool, counted)
        is_waiting = bool(counts) and set(counts) <= {"Scheduled", "Late", "AwaitingRetry"}
        if is_waiting and not self.count_workers():
            _log.warning(
                "%d runs wait, and no worker is online in the work pool %s: start `virnuc server worker` on a machine "
                "that sees the run's folder",
                counts.total(),
                self._pool,
            )

    def _post(self, path: str, body: Any) -> Any:
        return self._ask(lambda: self._client.request("POST", cast(Any, path), json=body).json())

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        """Repeats a request until the server answers it, and says so every minute.

        Raises:
            VirnucError: the server refuses the request.
        """
        begun = time.monotonic()
        next_notice = begun + _SECONDS_TO_FIRST_NOTICE
        while True:
            try:
                with self._without_retries:
                    return request()
            except ObjectNotFound as error:
                raise VirnucError(f"the Prefect server lacks what virnuc needs: {error}") from error
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status < 500 and status not in _TO_BE_TRIED_AGAIN:
                    raise VirnucError(
                        f"the Prefect server refuses: {error}. Was `virnuc server deploy` run with this version of virnuc?"
                    ) from error
                failure = f"status {status}"
            except httpx.HTTPError as error:
                failure = repr(error)
            if time.monotonic() >= next_notice:
                away = time.monotonic() - begun
                _log.warning(
                    "Prefect's server has not answered for %.0f s (%s): waiting for it", away, failure
                )
                next_notice = time.monotonic() + _SECONDS_BETWEEN_NOTICES
            time.sleep(_SECONDS_BETWEEN_POLLS)


def read_pages(read: Callable[..., Sequence[Item]]) -> list[Item]:
    """All items of a paginated request."""
    found: list[Item] = []
    while True:
        page = read(offset=len(found), limit=_PAGE_SIZE)
        found += page
        if len(page) < _PAGE_SIZE:
            return found


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
