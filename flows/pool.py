"""Lanes in a work pool: runs of a deployment, computed by workers on any machine that sees the run's folder.

The server knows the state of each lane; everything else goes through the run's folder. A retried run reattaches to the
lanes of the previous attempt that are still running and submits the rest.
"""

import hashlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, Final, Self, TypeVar, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling

from flows.lanes import FlowLanes, lane_journal_name, plan_journal_name
from flows.outputs import absolute_path
from tasks.lanes import LaneWatch
from tasks.stages import find_pending
from virnuc_core.env_config import env
from virnuc_core.errors import LaneError, UsageError, VirnucError
from virnuc_core.files import make_folder, write_text
from virnuc_core.inference.events import LaneFailed
from virnuc_core.inference.lane_journal import JournalTail, raise_failure
from virnuc_core.inference.launcher import assign_shards
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig

# Work pool of each kind of device; its deployments are named like the end of its name.
WORK_POOLS: Final = {"cuda": "virnuc-gpu", "cpu": "virnuc-cpu"}
# Before a resubmission; a host or a file system may need that long to recover.
RETRY_DELAYS_SECONDS: Final = (5.0, 30.0, 120.0)

_SECONDS_BETWEEN_POLLS: Final = 2.0
_SECONDS_BETWEEN_NOTICES: Final = 60.0
_SECONDS_TO_FIRST_NOTICE: Final = 15.0
_POLLS_UNTIL_STOPPED: Final = 30
_PAGE_SIZE: Final = 200  # the server's maximum
_ONLINE: Final = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})
_UNFINISHED: Final = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")

Item = TypeVar("Item")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lane:
    """Its number in the run, its shards, and its failures in a row without a finished shard."""

    number: int
    shards: tuple[int, ...]
    failures: int = 0


class PoolLanes(FlowLanes):
    """As many lanes as the work needs, each of about `lane_minutes`, queued for the workers.

    Devices "cpu" are those of the pool virnuc-cpu. Devices "auto" are those of virnuc-gpu, unless it never had a worker
    and virnuc-cpu has one.

    Raises:
        UsageError: GPU indices are given, or there is no server with virnuc's deployments.
        VirnucError: the server does not answer.
    """

    def __init__(self, where: LaneSettings, devices: tuple[str, ...]) -> None:
        if devices not in (("auto",), ("cpu",)):
            raise UsageError(
                f"--devices {','.join(devices)} cannot be chosen in mode pool, where every worker has its own: "
                "give auto or cpu, and choose GPUs where workers are started (`virnuc worker --devices`)."
            )
        url = require_lasting_server()
        with get_client(sync_client=True) as client:
            try:
                self._device = _pool_device(client, devices[0])
                self._pool = WORK_POOLS[self._device]
                suffix = self._pool.removeprefix("virnuc-")
                self._planning, self._computing = f"plan-run/{suffix}", f"embed-lane/{suffix}"
                for name in (self._planning, self._computing):
                    client.read_deployment_by_name(name)
            except ObjectNotFound as error:
                raise UsageError(
                    f"the Prefect server at {url} lacks work pools or deployments of virnuc: run `virnuc deploy` against "
                    "it."
                ) from error
            except httpx.HTTPError as error:
                raise VirnucError(
                    f"the Prefect server at {url} does not answer ({error!r}): start it, or set PREFECT_API_URL."
                ) from error
        super().__init__(self._device)
        self._queue = where.priority
        self._lane_seconds = 60 * where.lane_minutes

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Has a worker make the plan, since memory and speed depend on its hardware."""
        parameters = {
            "folder": str(folder.root.resolve()),
            "config": _for_worker(config).model_dump(mode="json"),
            "kind": kind,
            "device": self._device,
            "token": _token(folder),
        }
        delay = 0.0
        with PoolRuns(self._pool) as runs:
            # Queued lanes would run first; they are resubmitted once there is a plan.
            runs.stop(run.id for run in runs.find_unfinished(_run_tag(folder)) if not _is_at_work(run))
            for failures in count():
                run_id = runs.submit(self._planning, f"plan {folder.root.name}", parameters, delay=delay)
                while not (ended := runs.poll_final_states()):
                    pass
                failure = None
                for entry in JournalTail(folder.lane_journal(plan_journal_name(run_id))).read_new():
                    if isinstance(entry.event, LaneFailed):
                        failure = entry.event
                if ended[run_id].is_completed():
                    break
                delay = _retry_delay_or_raise("the planning", failure, ended[run_id], failures)
        return read_plan(folder.plan)

    def work(self, folder: RunFolder, watch: LaneWatch) -> None:
        """Submits lanes until no shard is missing; a failed lane is resubmitted with its missing shards.

        When one fails for good, the others are cancelled; finished shards are kept.
        """
        plan = read_plan(folder.plan)
        with PoolRuns(self._pool) as runs:
            lanes = _reattach_lanes(runs, folder, plan, watch)
            taken = {shard for lane in lanes.values() for shard in lane.shards}
            pending = find_pending(folder, taken)
            first = max((lane.number for lane in lanes.values()), default=-1) + 1
            seconds = sum(plan.shards[shard].cost for shard in pending)
            num_lanes = lanes_for(seconds, self._lane_seconds, runs.count_workers())
            for number, shards in enumerate(assign_shards(plan, pending, num_lanes), start=first):
                lane = _Lane(number=number, shards=shards)
                lanes[self._submit(runs, folder, plan, lane)] = lane
            while lanes:
                ended = runs.poll_final_states()
                watch.poll()
                for run_id, state in ended.items():
                    lane = lanes.pop(run_id)
                    missing = missing_shards(folder, lane.shards)
                    if not missing:
                        continue
                    failures = lane.failures if len(missing) == len(lane.shards) else 0
                    failure = watch.failure(lane_journal_name(lane.number, run_id))
                    delay = _retry_delay_or_raise(f"lane {lane.number}", failure, state, failures)
                    retry = replace(lane, shards=missing, failures=failures + 1)
                    lanes[self._submit(runs, folder, plan, retry, delay)] = retry

    def _submit(
        self, runs: "PoolRuns", folder: RunFolder, plan: RunPlan, lane: _Lane, delay: float = 0
    ) -> UUID:
        parameters = {
            "folder": str(folder.root.resolve()),
            "shards": lane.shards,
            "lane": lane.number,
            "device": self._device,
            "token": _token(folder),
        }
        name, tags = f"lane-{lane.number} {len(lane.shards)} shards", (_run_tag(folder), _plan_tag(plan))
        return runs.submit(self._computing, name, parameters, queue=self._queue, tags=tags, delay=delay)


class PoolRuns:
    """Flow runs that are polled; when the block is left by an error, they are cancelled.

    An unreachable server is waited for: the runs in the pool continue without it.
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
                self._cancel(self._unfinished)
        finally:
            self._client.__exit__(kind, *details)

    def submit(
        self,
        deployment: str,
        name: str,
        parameters: Mapping[str, Any],
        *,
        queue: str | None = None,
        tags: Sequence[str] = (),
        delay: float = 0,
        key: str | None = None,
    ) -> UUID:
        """Submits a run as a child of the current one; `delay` in seconds.

        With an idempotency `key`, it is the run that was submitted with it before, if there is one.
        """
        run = run_deployment(
            deployment,
            parameters=dict(parameters),
            flow_run_name=name,
            work_queue_name=queue,
            tags=tags,
            scheduled_time=datetime.now(UTC) + timedelta(seconds=delay),
            idempotency_key=key,
            timeout=0,
        )
        run_id = cast(FlowRun, run).id
        self._unfinished.add(run_id)
        return run_id

    def count_workers(self) -> int:
        """Online workers of the pool."""
        read = partial(self._client.read_workers_for_work_pool, self._pool, worker_filter=_ONLINE)
        return len(_read_pages(read))

    def find_unfinished(self, tag: str) -> list[FlowRun]:
        """Unfinished runs with this tag, whoever submitted them."""
        wanted = FlowRunFilter.model_validate(
            {"tags": {"all_": [tag]}, "state": {"type": {"any_": _UNFINISHED}}}
        )
        return _read_pages(partial(self._client.read_flow_runs, flow_run_filter=wanted))

    def find_newest(self, tag: str) -> FlowRun | None:
        """The run with this tag that was submitted last."""
        wanted = FlowRunFilter.model_validate({"tags": {"all_": [tag]}})
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
        found = self._client.read_flow_runs(flow_run_filter=wanted, sort=newest_first, limit=1)
        return found[0] if found else None

    def follow(self, run_ids: Iterable[UUID]) -> None:
        """Also polls runs submitted by an earlier attempt."""
        self._unfinished.update(run_ids)

    def leave(self, run_ids: Iterable[UUID]) -> None:
        """Polls and cancels these runs no longer."""
        self._unfinished.difference_update(run_ids)

    def stop(self, run_ids: Iterable[UUID]) -> None:
        """Cancels runs and waits up to a minute for them to end."""
        others = set(run_ids)
        self.follow(others)
        self._cancel(others)
        for _ in range(_POLLS_UNTIL_STOPPED):
            if not others & self._unfinished:
                return
            self.poll_final_states()
        _log.warning("%d runs do not stop; going on without them", len(others & self._unfinished))
        self._unfinished -= others

    def poll_final_states(self) -> dict[UUID, State[Any]]:
        """Sleeps for one interval; returns the final states of runs that have ended since the last call."""
        time.sleep(_SECONDS_BETWEEN_POLLS)
        is_notice_due = time.monotonic() >= self._next_notice
        if is_notice_due:
            self._next_notice = time.monotonic() + _SECONDS_BETWEEN_NOTICES
        try:
            states = self._read_states()
            if is_notice_due:
                self._log_status(states.values())
        except httpx.HTTPError as error:
            if is_notice_due:
                _log.warning("Prefect's server does not answer (%r): waiting for it", error)
            return {}
        ended = {run_id: state for run_id, state in states.items() if state.is_final()}
        self._unfinished -= ended.keys()
        return ended

    def _cancel(self, run_ids: Iterable[UUID]) -> None:
        """Running lanes take a while to stop and keep their finished shards."""
        for run_id in list(run_ids):
            with suppress(httpx.HTTPError, ObjectNotFound):
                self._client.set_flow_run_state(run_id, Cancelling())

    def _read_states(self) -> dict[UUID, State[Any]]:
        """The state of every run; a deleted one counts as cancelled."""
        ids = sorted(self._unfinished)
        states: dict[UUID, State[Any]] = {
            run_id: Cancelled(message="somebody deleted the run") for run_id in ids
        }
        for begin in range(0, len(ids), _PAGE_SIZE):
            wanted = FlowRunFilter.model_validate({"id": {"any_": ids[begin : begin + _PAGE_SIZE]}})
            for run in self._client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE_SIZE):
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
                "%d runs wait, and no worker is online in the work pool %s: start `virnuc worker` on a machine "
                "that sees the run's folder",
                counts.total(),
                self._pool,
            )


def require_lasting_server() -> str:
    """The address of the server in the user's settings; UsageError if none is set."""
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "mode pool needs a Prefect server that outlives this run: run `virnuc up` and set PREFECT_API_URL to the "
            "address that it prints, or choose mode local."
        )
    return url


def lanes_for(seconds: float, lane_seconds: float, num_workers: int) -> int:
    """Number of lanes for `seconds` of estimated work at about `lane_seconds` each.

    A multiple of the workers, so that none idles during the last lanes, but no lane shorter than a tenth of
    `lane_seconds`, most of which would be its startup.
    """
    num_lanes = max(1, math.ceil(seconds / lane_seconds))
    rounded = math.ceil(num_lanes / max(1, num_workers)) * num_workers
    return max(num_lanes, min(rounded, math.floor(10 * seconds / lane_seconds)))


def _pool_device(client: SyncPrefectClient, device: str) -> str:
    """The kind of device, "cuda" or "cpu", for `device` "auto" or "cpu"."""
    if device == "cpu":
        return "cpu"
    had_workers = client.read_workers_for_work_pool(WORK_POOLS["cuda"], limit=1)
    if had_workers or not client.read_workers_for_work_pool(WORK_POOLS["cpu"], worker_filter=_ONLINE):
        return "cuda"
    _log.info("%s never had a worker: the lanes compute on CPUs, in %s", *WORK_POOLS.values())
    return "cpu"


def _token(folder: RunFolder) -> str:
    """The token of the run's folder, made on the first call."""
    if not folder.token.exists():
        make_folder(folder.lanes)
        write_text(folder.token, secrets.token_hex(16))
    return folder.token.read_text()


def _reattach_lanes(runs: PoolRuns, folder: RunFolder, plan: RunPlan, watch: LaneWatch) -> dict[UUID, _Lane]:
    """The lanes of an earlier attempt that are running for this plan; its other lanes are stopped.

    Idempotency keys do not work here: they would also return crashed lanes, and the remaining shards are reassigned.
    """
    lanes: dict[UUID, _Lane] = {}
    others: list[UUID] = []
    for run in runs.find_unfinished(_run_tag(folder)):
        if _is_at_work(run) and _plan_tag(plan) in run.tags:
            number, shards = run.parameters["lane"], tuple(run.parameters["shards"])
            lanes[run.id] = _Lane(number=number, shards=shards)
            watch.adopt(lane_journal_name(number, run.id))
        else:
            others.append(run.id)
    if lanes or others:
        _log.warning(
            "%d lanes of an earlier run are still at work and are waited for; %d others are stopped",
            len(lanes),
            len(others),
        )
    runs.stop(others)
    runs.follow(lanes)
    return lanes


def _retry_delay_or_raise(what: str, failure: LaneFailed | None, state: State[Any], failures: int) -> float:
    """Seconds before a resubmission, after `failures` earlier failures in a row; `failure` is from the journal.

    Raises it when it is permanent or came too often.
    """
    # Without an entry in the journal, a process was killed (Crashed), or did not get as far as our code (Failed).
    can_help = failure.retryable if failure else not state.is_failed()
    if can_help and failures < len(RETRY_DELAYS_SECONDS):
        delay = RETRY_DELAYS_SECONDS[failures]
        reason = failure.message if failure else f"{state.name}: {state.message}"
        _log.warning("%s failed and is tried again in %.0f s: %s", what, delay, reason)
        return delay
    if failure:
        raise_failure(failure)
    raise LaneError(
        f"{what} ended in state {state.name} ({state.message}); the log of its run on the Prefect server says more. "
        "Finished shards are kept: run the same command again to go on."
    )


def _read_pages(read: Callable[..., Sequence[Item]]) -> list[Item]:
    """All items of a paginated request."""
    found: list[Item] = []
    while True:
        page = read(offset=len(found), limit=_PAGE_SIZE)
        found += page
        if len(page) < _PAGE_SIZE:
            return found


def _for_worker(config: RunConfig) -> RunConfig:
    """The config for a process with another working folder and environment."""
    names = ("esm_model", "dnabert_model", "head", "dna_head")
    paths = {name: absolute_path(path) for name in names if (path := getattr(config, name))}
    return config.model_copy(update={**paths, "switches": env().switches})


def _is_at_work(run: FlowRun) -> bool:
    """Whether a worker has taken the run and nobody has cancelled it."""
    return run.state is not None and (run.state.is_pending() or run.state.is_running())


def _run_tag(folder: RunFolder) -> str:
    """Identifies the folder that a lane works for."""
    return f"virnuc-run:{hashlib.sha256(str(folder.root.resolve()).encode()).hexdigest()[:12]}"


def _plan_tag(plan: RunPlan) -> str:
    """Identifies the plan of a lane: `--force` replaces the plan in the same folder."""
    return f"virnuc-plan:{plan.fingerprint[:12]}"
