"""Lanes in a work pool: runs of a deployment, computed by workers on any machine that sees the run's folder.

The server knows the state of each lane; everything else goes through the run's folder. A retried run cancels the lanes of
the attempt before, and submits lanes for the shards that are missing.
"""

import asyncio
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import State
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling, Scheduled

from flows import CPU_POOL, GPU_POOL
from flows.lanes import HELD, journal_name, lane_kind
from tasks.progress import LaneRows, current_progress
from tasks.server import read_all, server_url
from tasks.stages import step_task
from virnuc_core.env_config import env
from virnuc_core.errors import LaneError, UsageError, VirnucError
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
_SECONDS_BETWEEN_POLLS: Final = 2.0
_SECONDS_BETWEEN_NOTICES: Final = 60.0
# Lanes of a run at the server at a time: their states are read with one request, which gives 200 at most.
_MOST_LANES: Final = 190
_ONLINE: Final = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Some of a run's shards."""

    number: int
    title: str
    shards: tuple[int, ...]


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
        title = f"plan {folder.root.name}"

        @step_task(title)
        async def plan() -> None:
            await runs.complete(title, "plan", parameters)

        self._run(runs, plan)
        return read_plan(folder.plan)

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Submits lanes until no shard is missing; those that fail are tried again, elsewhere if there is another device.

        Raises:
            VirnucError: shards remain that could not be computed; finished ones are kept.
        """
        cancel_children()  # of an attempt before
        plan = read_plan(folder.plan)
        runs = PoolRuns(self._pool, self._computing, self._queue, folder, LaneRows(current_progress()))
        parameters = self._parameters(folder)
        failures: list[tuple[str, VirnucError]] = []
        window = asyncio.Semaphore(_MOST_LANES)

        async def embed_lane(lane: Lane) -> None:
            costs = (plan.shards[shard].cost for shard in lane.shards)
            patience = 1.5 * lane_timeout(costs)  # a lane ends a device process that hangs, and tries again

            @step_task(lane.title)
            async def embed() -> None:
                await runs.compute(lane, {**parameters, "lane": lane.number}, patience)

            async with window:
                try:
                    await embed()
                except VirnucError as error:
                    if not error.retryable:
                        raise
                    failures.append((lane.title, error))

        lanes = self._lanes(folder, plan)

        async def compute_all() -> None:
            async with asyncio.TaskGroup() as group:
                for lane in lanes:
                    group.create_task(embed_lane(lane))

        self._run(runs, compute_all)
        if failures:
            [(title, error), *more] = failures
            num_missing = len(_missing(folder, range(len(plan.shards))))
            raise type(error)(
                f"{num_missing} of {len(plan.shards)} shards could not be computed. {title}: {error} "
                f"{f'{len(more)} more lanes failed. ' if more else ''}Finished shards are kept: repeat the command to resume."
            )
        reports = runs.reports()
        warn_of_mixed_hardware(reports)
        return reports

    def _parameters(self, folder: RunFolder) -> dict[str, Any]:
        return {"folder": os.path.abspath(folder.root), "device": self._device, "token": _token(folder)}

    def _lanes(self, folder: RunFolder, plan: RunPlan) -> list[Lane]:
        """Lanes for the shards that are missing."""
        missing = _missing(folder, range(len(plan.shards)))
        remove_shard_temporaries(folder, missing)
        with get_client(sync_client=True) as client:
            num_workers = len(client.read_workers_for_work_pool(self._pool, worker_filter=_ONLINE))
        costs = [plan.shards[shard].cost for shard in missing]
        parts = list(divide(costs, self._lane_seconds, max(1, num_workers)))
        sample = plan.inputs[0].name if plan.inputs else folder.root.name
        return [
            Lane(
                number=number,
                title=f"{sample} lane {number + 1} of {len(parts)}, {len(part)} shard{'s' * (len(part) > 1)}",
                shards=missing[part.start : part.stop],
            )
            for number, part in enumerate(parts)
        ]

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
        self.state: State[Any] = Scheduled()
        self.events: list[LaneEvent] = []
        self.journal = journal
        self._tail = JournalTail(journal)
        self._progress = time.monotonic()

    def update(self, state: State[Any], observe: Observer) -> None:
        """Reads on in the journal, which need not exist yet; `state` was read before."""
        new = self._tail.read_new()
        if new or not state.is_running():
            self._progress = time.monotonic()
        self.events += new
        self.state = state
        for event in new:
            observe(event)

    def is_over(self, patience: float) -> bool:
        """Whether it has ended, is held, or has worked for `patience` seconds without progress."""
        return self.state.is_final() or self.is_held or time.monotonic() - self._progress > patience

    @property
    def is_held(self) -> bool:
        """Whether others do its work."""
        return self.state.name == HELD

    @property
    def error(self) -> VirnucError:
        """What stopped it for good: from its journal, or else its state."""
        if self.events and isinstance(failure := self.events[-1], LaneFailed):
            kind, text = error_of(failure)
            return kind(text)
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

    async def complete(self, title: str, kind: str, parameters: Mapping[str, Any]) -> None:
        """Submits a run until one ends that was not held.

        Raises:
            VirnucError: it failed.
        """
        is_done = False
        while not is_done:
            run, error = await self._submit(title, kind, parameters, math.inf)
            if error:
                raise error
            is_done = not run.is_held

    async def compute(self, lane: Lane, parameters: Mapping[str, Any], patience: float) -> None:
        """Submits a lane with the shards that it lacks, for as long as each run gets on or is held.

        Raises:
            VirnucError: a run failed or ended without a new shard.
        """
        missing = await asyncio.to_thread(_missing, self._folder, lane.shards)
        while missing:
            wanted = {**parameters, "shards": missing}
            run, error = await self._submit(lane.title, lane_kind(lane.number), wanted, patience)
            left = await asyncio.to_thread(_missing, self._folder, lane.shards)
            if len(left) == len(missing) and not run.is_held:
                lost = f"{lane.title}: its run ended without writing its shards to {self._folder.shards}."
                raise error or LaneError(lost)
            if error:
                _log.warning("%s continues elsewhere with %d shards: %s", lane.title, len(left), error)
            missing = left

    async def _submit(
        self, title: str, kind: str, parameters: Mapping[str, Any], patience: float
    ) -> tuple[PoolRun, VirnucError | None]:
        """Submits a run and waits until it is over; gives the error of one that failed or hangs."""
        submitted = await arun_deployment(
            self._deployment,
            parameters=dict(parameters),
            flow_run_name=title,
            idempotency_key=f"{self._attempt}-{kind}-{len(self._runs)}",
            work_queue_name=self._queue,
            timeout=0,
        )
        run = PoolRun(submitted.id, self._folder.lane_journal(journal_name(kind, submitted.id)))
        self._runs.append(run)
        self._at_work[run.id] = run
        async with self._changed:
            await self._changed.wait_for(lambda: run.is_over(patience))
        del self._at_work[run.id]
        if run.is_held:
            _log.warning("a worker accepts no work: %s", run.state.message)
            return run, None
        if not run.state.is_final():
            async with get_client() as client:
                await client.set_flow_run_state(run.id, Cancelling())
            return run, LaneError(f"its run hangs: no progress for {patience:.0f} s.")
        return run, None if run.state.is_completed() else run.error

    async def watch(self) -> None:
        """Reads the states and journals of all runs that have not ended, until cancelled.

        Raises:
            VirnucError: this flow run is being cancelled, or the server has not answered for long.
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
                    raise VirnucError(
                        f"this run was stopped on the Prefect server ({state}). Finished shards are kept."
                    )
                for run_id, state in found.items():
                    if (run := self._at_work.get(run_id)) is not None:
                        await asyncio.to_thread(run.update, state, self._observe)
                async with self._changed:
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
    wanted = FlowRunFilter.model_validate(
        {
            "parent_flow_run_id": {"any_": [flow_run.id]},
            "state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "PAUSED"]}},
        }
    )
    with get_client(sync_client=True) as client:
        for run in read_all(client.read_flow_runs, flow_run_filter=wanted):
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


async def _read_states(client: PrefectClient, run_ids: Sequence[UUID]) -> dict[UUID, State[Any]]:
    """The state of every run; a deleted one counts as cancelled."""
    states: dict[UUID, State[Any]] = {run_id: Cancelled(message="the run was deleted") for run_id in run_ids}
    wanted = FlowRunFilter.model_validate({"id": {"any_": run_ids}})
    found = await client.read_flow_runs(flow_run_filter=wanted)
    return states | {run.id: run.state for run in found if run.state is not None}


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
