"""Lanes in a work pool: runs of a deployment, computed by workers on any machine that sees the run's folder.

The server knows the state of each lane; everything else goes through the run's folder. A retried run takes over the lanes
of the attempt before, and submits the rest.
"""

import asyncio
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling

from flows import CPU_POOL, GPU_POOL
from flows.lanes import HELD, journal_name, lane_kind
from tasks.progress import LaneRows, current_progress
from tasks.server import read_all, server_url
from tasks.stages import retried_task
from virnuc_core.env_config import env
from virnuc_core.errors import CancelledRunError, LaneError, UsageError, VirnucError
from virnuc_core.files import make_folder, write_text
from virnuc_core.inference.events import LaneEvent, LaneFailed, LaneReport, LaneStarted, lane_report
from virnuc_core.inference.lane_journal import JournalTail, error_of
from virnuc_core.inference.lane_process import Observer, lane_timeout
from virnuc_core.inference.lanes import ignore, warn_of_mixed_hardware
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards, remove_shard_temporaries
from virnuc_core.models.catalogue import BUNDLED_HEADS, find_entries
from virnuc_core.retries import retrying
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig

# Work pool of each kind of device; its deployments are named like the end of its name.
WORK_POOLS: Final = {"cuda": GPU_POOL, "cpu": CPU_POOL}
# Before a lane or a plan that failed is submitted again; a host or a file system may need that long to recover.
RETRY_DELAYS_SECONDS: Final = [5.0, 30.0, 120.0, 300.0, 300.0]
_SECONDS_BETWEEN_POLLS: Final = 2.0
_SECONDS_BETWEEN_NOTICES: Final = 60.0
_MAX_READ: Final = 200  # the server's limit
_ONLINE: Final = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Some of a run's shards; `run_id` is the flow run of an attempt before that computes them."""

    number: int
    title: str
    shards: tuple[int, ...]
    run_id: UUID | None = None


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
                f"--devices {','.join(devices)} cannot be used in mode pool, where each worker has its own device: "
                "give auto or cpu, and choose GPUs with `virnuc server worker --devices`."
            )
        url = server_url()
        with get_client(sync_client=True) as client:
            try:
                self._device = pool_device(client, devices[0])
                self._pool = WORK_POOLS[self._device]
                kind = self._pool.removeprefix("virnuc-")
                self._planning, self._computing = f"plan-run/{kind}", f"embed-lane/{kind}"
                for name in (self._planning, self._computing):
                    client.read_deployment_by_name(name)
            except ObjectNotFound as error:
                raise UsageError(
                    f"the Prefect server at {url} has no work pools or deployments of virnuc: run `virnuc server deploy`."
                ) from error
            except httpx.HTTPError as error:
                raise VirnucError(
                    f"the Prefect server at {url} does not respond ({error!r}): start it or set PREFECT_API_URL."
                ) from error
        self._queue = where.priority
        self._lane_seconds = 60 * where.lane_minutes

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Has a worker make the plan, since memory and speed depend on its hardware."""
        parameters = self._parameters(folder)
        parameters |= {"config": for_worker(config).model_dump(mode="json"), "kind": kind}
        runs = PoolRuns(self._pool, self._planning, "plans", folder, ignore)

        async def make() -> None:
            title = f"plan {folder.root.name}"
            await _as_task(title, lambda: runs.complete(title, "plan", parameters), retries_in_vain=0)

        self._run(runs, make)
        return read_plan(folder.plan)

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Submits lanes until no shard is missing; those that fail are tried again, elsewhere if there is another device.

        Raises:
            VirnucError: shards remain that could not be computed; finished ones are kept.
        """
        plan = read_plan(folder.plan)
        runs = PoolRuns(self._pool, self._computing, self._queue, folder, LaneRows(current_progress()))
        parameters = self._parameters(folder)
        failures: dict[int, VirnucError] = {}
        window = asyncio.Semaphore(
            16
        )  # lanes that no worker has begun: workers read their parameters with every poll

        async def embed_lane(lane: Lane) -> None:
            own = {**parameters, "shards": lane.shards, "lane": lane.number}
            costs = (plan.shards[shard].cost for shard in lane.shards)
            patience = 1.5 * lane_timeout(costs)  # a lane ends a device process that hangs, and tries again
            with ExitStack() as waiting:
                waiting.callback(window.release)
                # Another host may have what this one lacks.
                work = partial(runs.compute, lane, own, patience, waiting.close)
                try:
                    await _as_task(lane.title, work, retries_in_vain=2)
                except VirnucError as error:
                    if not error.retryable:
                        raise
                    failures[lane.number] = error

        lanes = self._lanes(folder, plan)
        write_text(folder.flow_run, str(flow_run.id))  # by which an attempt after this one finds its lanes

        async def compute_all() -> None:
            async with asyncio.TaskGroup() as group:
                for lane in lanes:
                    await window.acquire()
                    group.create_task(embed_lane(lane))

        self._run(runs, compute_all)
        if failures:
            num_missing = len(_missing(folder, range(len(plan.shards))))
            raise _error_of(failures, f"{num_missing} of {len(plan.shards)} shards could not be computed")
        reports = runs.reports()
        warn_of_mixed_hardware(reports)
        return reports

    def _parameters(self, folder: RunFolder) -> dict[str, Any]:
        return {"folder": os.path.abspath(folder.root), "device": self._device, "token": _token(folder)}

    def _lanes(self, folder: RunFolder, plan: RunPlan) -> list[Lane]:
        """Lanes of earlier attempts that still wait or work, and new ones for the shards that none of them has."""
        earlier = list(_earlier_lanes(folder, self._computing))
        taken = {shard for lane in earlier for shard in lane.shards}
        pending = [shard for shard in _missing(folder, range(len(plan.shards))) if shard not in taken]
        remove_shard_temporaries(folder, pending)
        with get_client(sync_client=True) as client:
            num_workers = len(client.read_workers_for_work_pool(self._pool, worker_filter=_ONLINE))
        costs = [plan.shards[shard].cost for shard in pending]
        parts = list(divide(costs, self._lane_seconds, max(1, num_workers)))
        first = max((lane.number for lane in earlier), default=-1) + 1
        sample = plan.inputs[0].name if plan.inputs else folder.root.name
        new = [
            Lane(
                number=first + place,
                title=f"{sample} lane {first + place + 1} of {first + len(parts)}, {len(part)} shard{'s' * (len(part) > 1)}",
                shards=tuple(pending[part.start : part.stop]),
            )
            for place, part in enumerate(parts)
        ]
        return [*earlier, *new]

    def _run(self, runs: "PoolRuns", work: Callable[[], Any]) -> None:
        """Runs `work` while the states of its flow runs are read; when it fails, they are cancelled."""
        try:
            asyncio.run(_together(work, runs.watch))
        except BaseException:
            with suppress(httpx.HTTPError):
                cancel_children()
            raise


class PoolRun:
    """A submitted flow run: its state at the server, and the events of its journal, on whatever host it works."""

    def __init__(self, run_id: UUID, journal: Path) -> None:
        self.id = run_id
        self.state: State[Any] | None = None
        self.events: list[LaneEvent] = []
        self.journal = journal
        self._tail = JournalTail(journal)
        self._reading = Lock()

    def read(self, observe: Observer) -> None:
        """Reads on in the journal, which need not exist yet."""
        with self._reading:
            for event in self._tail.read_new():
                self.events.append(event)
                observe(event)

    def has_begun(self) -> bool:
        """Whether a worker has taken it."""
        return self.state is not None and not self.state.is_scheduled()

    @property
    def is_held(self) -> bool:
        """Whether others do its work."""
        return self.state is not None and self.state.name == HELD

    @property
    def error(self) -> VirnucError:
        """What stopped it for good: from its journal, or else its state."""
        if self.events and isinstance(failure := self.events[-1], LaneFailed):
            kind, text = error_of(failure)
            return kind(text)
        assert self.state is not None
        ended = f"{self.state.name} ({self.state.message})"
        return LaneError(f"its run ended as {ended}: see its log on the Prefect server.")


class PoolRuns:
    """Flow runs of a deployment, children of the current one, whose states and journals are read together."""

    def __init__(self, pool: str, deployment: str, queue: str, folder: RunFolder, observe: Observer) -> None:
        self._pool = pool
        self._deployment = deployment
        self._queue = queue
        self._folder = folder
        self._observe = observe
        self._attempt = f"{flow_run.id}-{flow_run.run_count}"
        self._runs: list[PoolRun] = []
        self._at_work: dict[UUID, PoolRun] = {}
        self._changed = asyncio.Condition()
        self._num_submitted: Counter[str] = Counter()

    async def complete(self, title: str, kind: str, parameters: Mapping[str, Any]) -> None:
        """Submits a run until one ends that was not held.

        Raises:
            VirnucError: it failed.
        """
        is_done = False
        while not is_done:
            run = await self._submit(title, kind, parameters)
            if error := await self._end(run, math.inf):
                raise error
            is_done = not run.is_held

    async def compute(
        self, lane: Lane, parameters: Mapping[str, Any], patience: float, on_begun: Callable[[], None]
    ) -> None:
        """Submits a lane with the shards that it lacks, for as long as each run gets on or is held.

        Raises:
            VirnucError: a run failed or ended without a new shard.
        """
        kind = lane_kind(lane.number)
        run = self._follow(lane.run_id, kind) if lane.run_id else None
        missing = await asyncio.to_thread(_missing, self._folder, lane.shards)
        while missing:
            run = run or await self._submit(lane.title, kind, {**parameters, "shards": missing})
            await self._until(run.has_begun)
            on_begun()
            error = await self._end(run, patience)
            left = await asyncio.to_thread(_missing, self._folder, lane.shards)
            if len(left) == len(missing) and not run.is_held:
                lost = f"{lane.title}: its run ended without writing its shards to {self._folder.shards}."
                raise error or LaneError(lost)
            if error:
                _log.warning("%s continues elsewhere with %d shards: %s", lane.title, len(left), error)
            missing, run = left, None

    async def _submit(self, title: str, kind: str, parameters: Mapping[str, Any]) -> PoolRun:
        self._num_submitted[kind] += 1
        run = await arun_deployment(
            self._deployment,
            parameters=dict(parameters),
            flow_run_name=title,
            idempotency_key=f"{self._attempt}-{kind}-{self._num_submitted[kind]}",
            work_queue_name=self._queue,
            timeout=0,
        )
        return self._follow(run.id, kind)

    def _follow(self, run_id: UUID, kind: str) -> PoolRun:
        run = PoolRun(run_id, self._folder.lane_journal(journal_name(kind, run_id)))
        self._runs.append(run)
        self._at_work[run_id] = run
        return run

    async def _end(self, run: PoolRun, patience: float) -> VirnucError | None:
        """Waits until a run ends or is held; returns the error of one that failed or has not got on for `patience` seconds."""
        num_events, since = -1, 0.0

        def is_over() -> bool:
            nonlocal num_events, since
            if run.state is None:
                return False
            if not run.state.is_running() or len(run.events) != num_events:
                num_events, since = len(run.events), time.monotonic()
            return run.state.is_final() or run.is_held or time.monotonic() - since > patience

        await self._until(is_over)
        del self._at_work[run.id]
        await asyncio.to_thread(run.read, self._observe)
        assert run.state is not None
        if run.is_held:
            _log.warning("a worker accepts no work: %s", run.state.message)
            return None
        if not run.state.is_final():
            async with get_client() as client:
                await client.set_flow_run_state(run.id, Cancelling())
            return LaneError(f"its run hangs: no progress for {patience:.0f} s.")
        return None if run.state.is_completed() else run.error

    async def _until(self, is_so: Callable[[], object]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)

    async def watch(self) -> None:
        """Reads the states and journals of all runs that have not ended, until cancelled.

        Raises:
            CancelledRunError: this flow run is being cancelled.
            VirnucError: the server has not answered for long.
        """
        own, notice = UUID(flow_run.id), time.monotonic() + _SECONDS_BETWEEN_NOTICES
        async with get_client() as client:
            while True:
                await asyncio.sleep(_SECONDS_BETWEEN_POLLS)
                try:
                    found = await _read_states(client, [own, *self._at_work])
                except httpx.HTTPError as error:
                    raise VirnucError(
                        f"the Prefect server has stopped responding ({error!r}). Finished shards are kept: retry this run "
                        "when the server is back."
                    ) from error
                if not (state := found.pop(own)).is_running():
                    raise CancelledRunError(
                        f"this run was stopped on the Prefect server ({state}). Finished shards are kept."
                    )
                for run in list(self._at_work.values()):
                    await asyncio.to_thread(run.read, self._observe)
                async with self._changed:
                    for run_id in found.keys() & self._at_work.keys():
                        self._at_work[run_id].state = found[run_id]
                    self._changed.notify_all()
                if time.monotonic() > notice and found:
                    notice = time.monotonic() + _SECONDS_BETWEEN_NOTICES
                    await self._notice(client, list(found.values()))

    def reports(self) -> list[LaneReport]:
        """The work of every lane that has started."""
        reports = []
        for run in self._runs:
            begun = [place for place, event in enumerate(run.events) if isinstance(event, LaneStarted)]
            if begun:
                reports.append(lane_report(run.events[begun[0] :], run.journal.stem))
        return sorted(reports, key=lambda report: (report.lane, report.started))

    async def _notice(self, client: PrefectClient, states: Sequence[State[Any]]) -> None:
        """Logs what the runs do, and warns when no worker is online."""
        counts = Counter(state.name or state.type.value for state in states)
        _log.info(
            "work pool %s: %s", self._pool, ", ".join(f"{n} {name.lower()}" for name, n in counts.items())
        )
        if all(state.is_scheduled() for state in states) and not await client.read_workers_for_work_pool(
            self._pool, worker_filter=_ONLINE
        ):
            _log.warning(
                "%d runs are waiting, but no worker is online in work pool %s: start `virnuc server worker` on a host with "
                "access to the run folder",
                len(states),
                self._pool,
            )


def divide(costs: Sequence[float], lane_seconds: float, num_slots: int) -> Iterator[range]:
    """Divides shards of these costs into lanes, shorter ones at the end so that all devices end together.

    A lane is an equal part of what is left, but neither longer than `lane_seconds` nor shorter than a tenth of it.
    """
    left, begin = sum(costs), 0
    while begin < len(costs):
        wanted = max(lane_seconds / 10, min(lane_seconds, left / num_slots))
        end, seconds = begin + 1, costs[begin]
        while end < len(costs) and seconds + costs[end] <= wanted:
            seconds += costs[end]
            end += 1
        yield range(begin, end)
        left, begin = left - seconds, end


def pool_device(client: SyncPrefectClient, device: str) -> str:
    """The kind of device, "cuda" or "cpu", for `device` "auto" or "cpu"."""
    if device == "cpu":
        return "cpu"
    had_workers = client.read_workers_for_work_pool(WORK_POOLS["cuda"], limit=1)
    if had_workers or not client.read_workers_for_work_pool(WORK_POOLS["cpu"], worker_filter=_ONLINE):
        return "cuda"
    _log.info("work pool %s never had a worker: the lanes run on CPUs in work pool %s", *WORK_POOLS.values())
    return "cpu"


def cancel_children() -> None:
    """Cancels the flow runs that this one has submitted and that have not ended; they keep what is finished."""
    with get_client(sync_client=True) as client:
        for run in _unfinished_children(client, [UUID(flow_run.id)]):
            client.set_flow_run_state(run.id, Cancelling(message="The run that it belongs to has ended."))


async def _together(work: Callable[[], Any], watch: Callable[[], Any]) -> None:
    """Runs both until `work` ends, or one of them fails."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await work()
            watching.cancel()
    except ExceptionGroup as failures:
        first: Exception = failures
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _as_task(name: str, work: Callable[[], Any], *, retries_in_vain: int) -> None:
    """Runs `work` as a task, which is retried when it fails; `retries_in_vain` times after errors that are likely to recur."""

    async def is_retried(task: Any, run: Any, state: State[Any]) -> bool:
        error = await state.aresult(raise_on_failure=False)
        limit = len(RETRY_DELAYS_SECONDS) if getattr(error, "retryable", False) else retries_in_vain
        if not isinstance(error, VirnucError) or run.run_count > limit:
            return False
        delay = RETRY_DELAYS_SECONDS[run.run_count - 1]
        _log.warning("%s failed; retry in %.0f s: %s", name, delay, error)
        return True

    @retried_task(name, RETRY_DELAYS_SECONDS, is_retried)
    async def step() -> None:
        await work()

    await step()


async def _read_states(client: PrefectClient, run_ids: Sequence[UUID]) -> dict[UUID, State[Any]]:
    """The state of every run; a deleted one counts as cancelled."""
    states: dict[UUID, State[Any]] = {run_id: Cancelled(message="the run was deleted") for run_id in run_ids}
    for begin in range(0, len(run_ids), _MAX_READ):
        wanted = FlowRunFilter.model_validate({"id": {"any_": run_ids[begin : begin + _MAX_READ]}})
        for run in await client.read_flow_runs(flow_run_filter=wanted, limit=_MAX_READ):
            if run.state is not None:
                states[run.id] = run.state
    return states


def _earlier_lanes(folder: RunFolder, deployment: str) -> Iterator[Lane]:
    """Lanes that wait or work for an earlier attempt at the run in a folder; those that were started over are cancelled."""
    attempts = {UUID(flow_run.id)}
    if folder.flow_run.exists():
        attempts.add(UUID(folder.flow_run.read_text()))
    with get_client(sync_client=True) as client:
        deployment_id = client.read_deployment_by_name(deployment).id
        for run in _unfinished_children(client, attempts):
            if run.deployment_id != deployment_id or run.state is None or run.state.name == HELD:
                continue
            if run.parameters["token"] != folder.token.read_text():
                client.set_flow_run_state(run.id, Cancelling(message="The run was started over."))
            elif not run.state.is_cancelling():
                _log.info("%s of an earlier attempt continues", run.name)
                shards = tuple(run.parameters["shards"])
                yield Lane(number=run.parameters["lane"], title=run.name, shards=shards, run_id=run.id)


def _unfinished_children(client: SyncPrefectClient, parents: Iterable[UUID]) -> list[FlowRun]:
    wanted = FlowRunFilter.model_validate(
        {
            "parent_flow_run_id": {"any_": list(parents)},
            "state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING"]}},
        }
    )
    return read_all(client.read_flow_runs, flow_run_filter=wanted)


def _missing(folder: RunFolder, shards: Iterable[int]) -> tuple[int, ...]:
    return retrying("the list of shards", lambda: missing_shards(folder, shards))


def _token(folder: RunFolder) -> str:
    """The token of the run's folder, made on the first call."""
    if not folder.token.exists():
        make_folder(folder.lanes)
        write_text(folder.token, secrets.token_hex(16))
    return folder.token.read_text()


def absolute_path(name: str) -> str:
    """Makes the path of a model or head absolute, for processes in other folders; names stay as they are."""
    path = os.path.expanduser(name)
    is_name = name in BUNDLED_HEADS or find_entries(name, None)  # names take precedence over paths
    return name if is_name or not os.path.exists(path) else os.path.abspath(path)


def for_worker(config: RunConfig) -> RunConfig:
    """The config for a process with another working folder and environment."""
    names = ("esm_model", "dnabert_model", "head")
    paths = {name: absolute_path(path) for name in names if (path := getattr(config, name))}
    return config.model_copy(update={**paths, "switches": env().switches})


def _error_of(failures: Mapping[int, VirnucError], what: str) -> VirnucError:
    """An error with the reasons of all lanes, of their class if that is one."""
    numbers: dict[str, list[str]] = {}
    for number, error in sorted(failures.items()):
        numbers.setdefault(str(error), []).append(str(number + 1))
    shown = [f"lane {', '.join(lanes)}: {text}" for text, lanes in numbers.items()]
    reasons = "; ".join([*shown[:5], *([f"and {len(shown) - 5} more reasons"] if len(shown) > 5 else [])])
    kinds = {type(error) for error in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else LaneError
    return kind(f"{what}: {reasons} Finished shards are kept: repeat the command to resume.")
