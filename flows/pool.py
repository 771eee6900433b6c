"""Lanes in a work pool: runs of a deployment, computed by workers on any machine that sees the run's folder.

The server knows the state of each lane; everything else goes through the run's folder. A retried run reattaches to the
lanes of the previous attempt and submits the rest.
"""

import hashlib
import logging
import os
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from flows import CPU_POOL, GPU_POOL
from flows.lanes import lane_journal_name, plan_journal_name
from flows.outputs import absolute_path
from tasks.lanes import LaneWatch
from tasks.pool_runs import ONLINE, PoolRun, PoolRuns
from tasks.progress import LaneRows, current_progress
from virnuc_core.env_config import env
from virnuc_core.errors import LaneError, UsageError, VirnucError
from virnuc_core.files import make_folder, write_text
from virnuc_core.inference.events import GpuSample, LaneFailed, LaneReport, LaneStarted, ShardDone
from virnuc_core.inference.lane_journal import JournalTail, error_of
from virnuc_core.inference.lane_process import lane_timeout
from virnuc_core.inference.lanes import warn_of_mixed_hardware
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards, pending_shards, remove_shard_temporaries
from virnuc_core.retries import retrying
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig

# Work pool of each kind of device; its deployments are named like the end of its name.
WORK_POOLS: Final = {"cuda": GPU_POOL, "cpu": CPU_POOL}
# Before a resubmission; a host or a file system may need that long to recover.
RETRY_DELAYS_SECONDS: Final = (5.0, 30.0, 120.0)
# Lanes that wait at the server, or as many as are at work: their parameters are sent with every poll of a worker.
MIN_WAITING: Final = 16

_MAX_FAILURES: Final = 3
_MAX_IN_VAIN: Final = 10
# A lane ends a device process that hangs by itself, and tries again.
_PARENT_PATIENCE: Final = 1.5
_REASONS_SHOWN: Final = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Its number in the run, its shards, how often it was submitted before, and failures that count against it."""

    number: int
    shards: tuple[int, ...]
    attempt: int = 0
    failures: int = 0

    def again(self, shards: tuple[int, ...], failures: int) -> "Lane":
        """What is left of it, to be submitted once more."""
        return replace(self, shards=shards, failures=failures, attempt=self.attempt + 1)

    @property
    def delay(self) -> float:
        """Seconds until it may start again."""
        return RETRY_DELAYS_SECONDS[min(self.attempt, len(RETRY_DELAYS_SECONDS)) - 1] if self.attempt else 0.0


class Backlog:
    """The shards that no lane has, and what is known about failures: which work to try again, and which to give up.

    A lane is set aside after three failures without a finished shard, and tried again when all others are done. A failure
    does not count against a lane that did not start, or whose device fails everything while others work.
    """

    def __init__(
        self, costs: Sequence[float], pending: Iterable[int], lane_seconds: float, first: int
    ) -> None:
        self._costs = costs
        self._pending = deque(pending)
        self._left = sum(costs[shard] for shard in self._pending)
        self._lane_seconds = lane_seconds
        self._next_number = first
        self._set_aside: list[Lane] = []
        self._is_second_round_due = False
        self._working: set[str] = set()  # devices that finished a shard and have not failed since
        self._failing: set[str] = set()  # devices that failed and have not finished a shard since
        self._reasons: dict[int, tuple[type[VirnucError], str]] = {}
        self._unstarted = self._fruitless = 0

    def take(self, num_slots: int) -> Lane | None:
        """The next lane: an equal part of what is left, but neither longer than asked for nor shorter than a tenth."""
        if not self._pending:
            return None
        wanted = max(self._lane_seconds / 10, min(self._lane_seconds, self._left / num_slots))
        shards = [self._pending.popleft()]
        seconds = self._costs[shards[0]]
        while self._pending and seconds + self._costs[self._pending[0]] <= wanted:
            shards.append(self._pending.popleft())
            seconds += self._costs[shards[-1]]
        self._left -= seconds
        self._next_number += 1
        return Lane(number=self._next_number - 1, shards=tuple(shards))

    def on_start(self) -> None:
        """A lane's process has started."""
        self._unstarted = 0

    def on_shard(self, device: str) -> None:
        """A shard was finished on a device of a host."""
        self._unstarted = self._fruitless = 0
        self._working.add(device)
        self._failing.discard(device)
        self._is_second_round_due = bool(self._set_aside)

    def retry(
        self, lane: Lane, missing: tuple[int, ...], device: str | None, reason: tuple[type[VirnucError], str]
    ) -> Lane | None:
        """The lane to submit for the missing shards of one that ended, or None if it is set aside.

        `device` is None for a lane that ended before it started.
        """
        if len(missing) < len(lane.shards):
            return lane.again(missing, failures=0)
        self._reasons[lane.number] = reason
        if device is None:
            self._unstarted += 1
            return lane.again(missing, lane.failures)
        self._fruitless += 1
        self._working.discard(device)
        counts = device not in self._failing or not self._working
        self._failing.add(device)
        lane = lane.again(missing, lane.failures + counts)
        if lane.failures < _MAX_FAILURES:
            return lane
        self._set_aside.append(lane)
        return None

    def take_second_round(self) -> list[Lane]:
        """The lanes that were set aside, if a shard was finished since."""
        if not self._is_second_round_due:
            return []
        lanes, self._set_aside, self._is_second_round_due = self._set_aside, [], False
        return [replace(lane, failures=0) for lane in lanes]

    def is_hopeless(self, devices: Iterable[str], num_lanes: int) -> bool:
        """Whether to give up: `num_lanes` wait or are at work, of these some on `devices`, and one after another fails."""
        limit = max(_MAX_IN_VAIN, _MAX_FAILURES * num_lanes)
        return max(self._unstarted, self._fruitless) >= limit and self._failing.issuperset(devices)

    def error(self, num_missing: int) -> VirnucError:
        """Why shards are missing; of the class of the failures if they have one in common."""
        kinds = {kind for kind, _ in self._reasons.values()}
        numbers: dict[str, list[str]] = {}
        for number, (_, text) in sorted(self._reasons.items()):
            numbers.setdefault(text, []).append(str(number))
        shown = [f"lane {', '.join(lanes)}: {text}" for text, lanes in numbers.items()]
        more = f"; and {len(shown) - _REASONS_SHOWN} more reasons" if len(shown) > _REASONS_SHOWN else ""
        kind = kinds.pop() if len(kinds) == 1 else LaneError
        return kind(
            f"{num_missing} of {len(self._costs)} shards could not be computed: {'; '.join(shown[:_REASONS_SHOWN])}{more} "
            "Finished shards are kept: run the same command again to go on."
        )


class PoolLanes:
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
                "give auto or cpu, and choose GPUs where workers are started (`virnuc server worker --devices`)."
            )
        url = require_lasting_server()
        with get_client(sync_client=True) as client:
            try:
                self.device = pool_device(client, devices[0])
                self._pool = WORK_POOLS[self.device]
                suffix = self._pool.removeprefix("virnuc-")
                self._planning, self._computing = f"plan-run/{suffix}", f"embed-lane/{suffix}"
                for name in (self._planning, self._computing):
                    client.read_deployment_by_name(name)
            except ObjectNotFound as error:
                raise UsageError(
                    f"the Prefect server at {url} lacks work pools or deployments of virnuc: run `virnuc server deploy` against "
                    "it."
                ) from error
            except httpx.HTTPError as error:
                raise VirnucError(
                    f"the Prefect server at {url} does not answer ({error!r}): start it, or set PREFECT_API_URL."
                ) from error
        self._queue = where.priority
        self._lane_seconds = 60 * where.lane_minutes
        self.devices_of_host = 1

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Has a worker make the plan, since memory and speed depend on its hardware."""
        parameters = {
            "folder": os.path.abspath(folder.root),
            "config": for_worker(config).model_dump(mode="json"),
            "kind": kind,
            "device": self.device,
            "token": _token(folder),
        }
        attempt, failures, delay, tag = 0, 0, 0.0, _run_tag(folder)
        with PoolRuns(self._pool, self._planning, "plans") as runs:
            runs.stop(runs.find_unfinished(tag))
            while True:
                run = PoolRun(
                    key=f"{_attempt_id()}-plan-{attempt}",
                    name=f"plan {folder.root.name}",
                    parameters=parameters,
                    tags=(tag,),
                    timeout=_PARENT_PATIENCE * lane_timeout([]),
                    delay=delay,
                )
                [run_id] = runs.submit([run])
                while not (ended := runs.poll()):
                    runs.end_overdue()
                tail = JournalTail(folder.lane_journal(plan_journal_name(run_id)))
                events = tail.read_new()
                for event in events:
                    if isinstance(event, LaneStarted):
                        self.devices_of_host = event.devices_of_host
                if ended[run_id].is_completed():
                    break
                failure = events[-1] if events and isinstance(events[-1], LaneFailed) else None
                kind_of_error, reason = _reason(failure, ended[run_id])
                attempt, failures = attempt + 1, failures + bool(events)
                is_final = failure is not None and not failure.retryable
                if is_final or failures > _MAX_FAILURES or attempt >= _MAX_IN_VAIN:
                    raise kind_of_error(reason)
                delay = RETRY_DELAYS_SECONDS[min(attempt, len(RETRY_DELAYS_SECONDS)) - 1]
                _log.warning("the planning failed and is tried again in %.0f s: %s", delay, reason)
        return read_plan(folder.plan)

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Submits lanes until no shard is missing; those that fail are tried again, elsewhere if there is another device.

        Raises:
            VirnucError: shards remain that could not be computed; finished ones are kept.
        """
        plan = read_plan(folder.plan)
        watch = LaneWatch(folder, LaneRows(current_progress()))
        with PoolRuns(self._pool, self._computing, self._queue) as runs:
            work = _PoolWork(runs, watch, folder, plan, self.device)
            num_slots = self.devices_of_host * runs.count_workers()
            pending, first = work.reattach()
            backlog = Backlog([shard.cost for shard in plan.shards], pending, self._lane_seconds, first)
            while work.submit_waiting(backlog, num_slots):
                work.attend(backlog)
            if missing := retrying("the list of shards", partial(missing_shards, folder, pending)):
                raise backlog.error(len(missing))
        warn_of_mixed_hardware(watch.reports)
        return watch.reports


class _PoolWork:
    """The lanes of a run that are at the server."""

    def __init__(
        self, runs: PoolRuns, watch: LaneWatch, folder: RunFolder, plan: RunPlan, device: str
    ) -> None:
        self._runs, self._watch, self._folder, self._plan = runs, watch, folder, plan
        self._lanes: dict[UUID, Lane] = {}
        self._tags = (_run_tag(folder), f"virnuc-plan:{plan.fingerprint[:12]}")
        self._parameters = {
            "folder": os.path.abspath(folder.root),
            "device": device,
            "token": _token(folder),
        }

    def reattach(self) -> tuple[tuple[int, ...], int]:
        """Takes over the lanes of an earlier attempt, and stops those of another plan in this folder.

        Returns the shards that no lane has, and the first number for a new lane.
        """
        others = []
        for run in self._runs.find_unfinished(self._tags[0]):
            parameters = run.parameters
            is_ours = self._tags[1] in run.tags and parameters["token"] == self._parameters["token"]
            if is_ours and run.state is not None and not run.state.is_cancelling():
                self._add(run.id, Lane(number=parameters["lane"], shards=tuple(parameters["shards"])))
                self._runs.follow(run, self._timeout(parameters["shards"]))
            else:
                others.append(run)
        if self._lanes or others:
            _log.warning(
                "%d lanes of an earlier run still wait or work and are taken over; %d others are stopped",
                len(self._lanes),
                len(others),
            )
        self._runs.stop(others)
        taken = {shard for lane in self._lanes.values() for shard in lane.shards}
        first = max((lane.number for lane in self._lanes.values()), default=-1) + 1
        every = retrying("the search for finished shards", partial(pending_shards, self._folder, self._plan))
        pending = tuple(shard for shard in every if shard not in taken)
        remove_shard_temporaries(self._folder, pending)
        return pending, first

    def submit_waiting(self, backlog: Backlog, num_slots: int) -> bool:
        """Submits as many lanes as may wait; returns whether any wait or are at work then."""
        room = max(MIN_WAITING, self._runs.num_at_work) - self._runs.num_waiting
        num_slots = max(1, num_slots, self._runs.num_at_work)
        lanes: list[Lane] = []
        while len(lanes) < room and (lane := backlog.take(num_slots)):
            lanes.append(lane)
        if not lanes and not self._lanes:
            lanes = backlog.take_second_round()
        self._submit(lanes)
        return bool(self._lanes)

    def attend(self, backlog: Backlog) -> None:
        """Waits for one interval, and sees to the lanes that ended or hang.

        Raises:
            VirnucError: one lane after another fails, and none is at work on a device that works.
        """
        ended = self._runs.poll()
        runs = {lane_journal_name(lane.number, run_id): run_id for run_id, lane in self._lanes.items()}
        for name, events in self._watch.poll().items():
            start = self._watch.start(name)
            for event in events:
                if not isinstance(event, GpuSample):
                    self._runs.touch(runs[name])
                if isinstance(event, LaneStarted):
                    backlog.on_start()
                elif isinstance(event, ShardDone) and start:
                    backlog.on_shard(start.place)
        self._runs.end_overdue()
        retries = [
            lane for run_id, state in ended.items() if (lane := self._take_back(run_id, state, backlog))
        ]
        starts = [self._watch.start(name) for name, run_id in runs.items() if run_id in self._lanes]
        if backlog.is_hopeless({start.place for start in starts if start}, len(self._lanes) + len(retries)):
            every = range(len(self._plan.shards))
            raise backlog.error(len(self._missing(every)))
        self._submit(retries)

    def _take_back(self, run_id: UUID, state: State[Any], backlog: Backlog) -> Lane | None:
        """What is to be tried again of a lane that has ended."""
        lane = self._lanes.pop(run_id)
        name = lane_journal_name(lane.number, run_id)
        self._watch.leave(name)
        missing = self._missing(lane.shards)
        if not missing:
            return None
        start, (kind, reason) = self._watch.start(name), _reason(self._watch.failure(name), state)
        retry = backlog.retry(lane, missing, start.place if start else None, (kind, reason))
        what = f"is tried again in {retry.delay:.0f} s" if retry else "is set aside until the others are done"
        _log.warning("lane %d failed and %s: %s", lane.number, what, reason)
        return retry

    def _missing(self, shards: Iterable[int]) -> tuple[int, ...]:
        return retrying("the list of shards", partial(missing_shards, self._folder, shards))

    def _submit(self, lanes: Sequence[Lane]) -> None:
        runs = [
            PoolRun(
                key=f"{_attempt_id()}-{lane.number}-{lane.attempt}",
                name=f"lane-{lane.number} {len(lane.shards)} shards",
                parameters={**self._parameters, "shards": lane.shards, "lane": lane.number},
                tags=self._tags,
                timeout=self._timeout(lane.shards),
                delay=lane.delay,
            )
            for lane in lanes
        ]
        for run_id, lane in zip(self._runs.submit(runs), lanes, strict=True):
            self._add(run_id, lane)

    def _add(self, run_id: UUID, lane: Lane) -> None:
        self._lanes[run_id] = lane
        self._watch.follow(lane_journal_name(lane.number, run_id))

    def _timeout(self, shards: Iterable[int]) -> float:
        return _PARENT_PATIENCE * lane_timeout(self._plan.shards[shard].cost for shard in shards)


def require_lasting_server() -> str:
    """The address of the server in the user's settings; UsageError if none is set."""
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "mode pool needs a Prefect server that outlives this run: run `virnuc server up` and set PREFECT_API_URL to the "
            "address that it prints, or choose mode local."
        )
    return url


def pool_device(client: SyncPrefectClient, device: str) -> str:
    """The kind of device, "cuda" or "cpu", for `device` "auto" or "cpu"."""
    if device == "cpu":
        return "cpu"
    had_workers = client.read_workers_for_work_pool(WORK_POOLS["cuda"], limit=1)
    if had_workers or not client.read_workers_for_work_pool(WORK_POOLS["cpu"], worker_filter=ONLINE):
        return "cuda"
    _log.info("%s never had a worker: the lanes compute on CPUs, in %s", *WORK_POOLS.values())
    return "cpu"


def _token(folder: RunFolder) -> str:
    """The token of the run's folder, made on the first call."""
    if not folder.token.exists():
        make_folder(folder.lanes)
        write_text(folder.token, secrets.token_hex(16))
    return folder.token.read_text()


def _reason(failure: LaneFailed | None, state: State[Any]) -> tuple[type[VirnucError], str]:
    """Class and text of what ended a run: from its journal, or else what the server knows."""
    if failure:
        return error_of(failure)
    return (
        LaneError,
        f"its run ended in state {state.name} ({state.message}); its log on the Prefect server says more.",
    )


def for_worker(config: RunConfig) -> RunConfig:
    """The config for a process with another working folder and environment."""
    names = ("esm_model", "dnabert_model", "head")
    paths = {name: absolute_path(path) for name in names if (path := getattr(config, name))}
    return config.model_copy(update={**paths, "switches": env().switches})


def _run_tag(folder: RunFolder) -> str:
    """Identifies the folder that a run in the pool works for."""
    return f"virnuc-run:{hashlib.sha256(os.path.abspath(folder.root).encode()).hexdigest()[:12]}"


def _attempt_id() -> str:
    """Identifies the current attempt of the current flow run."""
    return f"{flow_run.id}-{flow_run.run_count}"
