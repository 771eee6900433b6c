"""Lanes in a work pool: runs of a deployment, done by workers on any machine that sees the run's folder.

The server knows who shall do what and how it ended; all else goes through the run's folder. So a run that is tried
again finds the lanes of the run before it, leaves them what they are at, and asks for the rest.
"""

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final
from uuid import UUID

from prefect.client.schemas.objects import FlowRun, State

from flows.naming import lane_journal_name, plan_journal_name
from flows.outputs import absolute_path
from flows.pool_runs import PoolRuns, require_deployments
from tasks.lanes import LaneWatch
from tasks.stages import find_pending
from tasks.tracking import Value
from virnuc_core.env_config import env
from virnuc_core.errors import LaneError, UsageError
from virnuc_core.inference.events import LaneFailed, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail, raise_failure
from virnuc_core.inference.launcher import assign_shards
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

WORK_POOL: Final = "virnuc-gpu"
LANE_DEPLOYMENT: Final = "embed-lane/gpu"
PLAN_DEPLOYMENT: Final = "plan-run/gpu"
# Until what has failed is asked for again; a host or a file system may need that long to come back.
RETRY_DELAYS_SECONDS: Final = (5.0, 30.0, 120.0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lane:
    """A share of the work: its number in the run, its shards, and how often it failed without finishing one."""

    number: int
    shards: tuple[int, ...]
    failures: int = 0


class PoolLanes:
    """As many lanes as there is work for, each about as long as asked for, taken from a queue by the workers.

    Args:
        devices: "auto" or "cpu", as each worker sees it.
        lane_minutes: estimated work of a lane, in minutes.

    Raises:
        UsageError: indices of GPUs are given, or there is no server with virnuc's deployments.
    """

    def __init__(self, devices: tuple[str, ...], lane_minutes: float) -> None:
        if devices not in (("auto",), ("cpu",)):
            raise UsageError(
                f"--devices {','.join(devices)} cannot be chosen in mode pool, where every worker has its own: "
                "give auto or cpu, and choose GPUs where workers are started (`virnuc worker --devices`)."
            )
        require_deployments((PLAN_DEPLOYMENT, LANE_DEPLOYMENT))
        self._device = devices[0]
        self._lane_device = devices[0]  # once the run is planned, the kind of device that it is planned for
        self._lane_seconds = 60 * lane_minutes

    @property
    def settings(self) -> Mapping[str, Value]:
        """The mode and the devices."""
        return {"mode": "pool", "devices": self._device}

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Has the plan made by a worker, since what fits and what is fast depends on its hardware.

        Raises:
            VirnucError: what stopped the planning.
        """
        parameters = {
            "folder": str(folder.root.resolve()),
            "config": _for_a_worker(config).model_dump(mode="json"),
            "kind": kind,
            "device": self._device,
        }
        delay = 0.0
        with PoolRuns(WORK_POOL) as runs:
            # They would be done first, and are asked for again when there is a plan.
            runs.stop(run.id for run in runs.find_unfinished(_run_tag(folder)) if not _is_at_work(run))
            for failures in count():
                run_id = runs.submit(PLAN_DEPLOYMENT, f"plan {folder.root.name}", parameters, delay=delay)
                while not (ended := runs.wait_for_some()):
                    pass
                entries = JournalTail(folder.lane_journal(plan_journal_name(run_id))).read_new()
                if ended[run_id].is_completed():
                    starts = (entry.event for entry in entries if isinstance(entry.event, LaneStarted))
                    kinds = (event.device.partition(":")[0] for event in starts)
                    self._lane_device = next(kinds, self._device)
                    break
                told = [entry.event for entry in entries if isinstance(entry.event, LaneFailed)]
                delay = _delay_after("the planning", told[-1] if told else None, ended[run_id], failures)
        return read_plan(folder.plan)

    def work(self, folder: RunFolder, watch: LaneWatch) -> None:
        """Submits lanes until no shard is missing; a lane that fails is submitted again with what it left.

        Raises:
            VirnucError: what stopped a lane for good; the other lanes are cancelled, and what is finished is kept.
        """
        plan = read_plan(folder.plan)
        with PoolRuns(WORK_POOL) as runs:
            lanes = self._take_over(runs, folder, plan, watch)
            taken = {shard for lane in lanes.values() for shard in lane.shards}
            pending = find_pending(folder, taken)
            first = max((lane.number for lane in lanes.values()), default=-1) + 1
            seconds = sum(plan.shards[shard].cost for shard in pending)
            num_lanes = lanes_for(seconds, self._lane_seconds, runs.count_workers())
            for number, shards in enumerate(assign_shards(plan, pending, num_lanes), start=first):
                lane = _Lane(number=number, shards=shards)
                lanes[self._submit(runs, folder, plan, lane)] = lane
            while lanes:
                ended = runs.wait_for_some()
                watch.poll()
                for run_id, state in ended.items():
                    lane = lanes.pop(run_id)
                    left = missing_shards(folder, lane.shards)
                    if not left:
                        continue
                    failures = lane.failures if len(left) == len(lane.shards) else 0
                    failure = watch.failure(lane_journal_name(lane.number, run_id))
                    delay = _delay_after(f"lane {lane.number}", failure, state, failures)
                    again = replace(lane, shards=left, failures=failures + 1)
                    lanes[self._submit(runs, folder, plan, again, delay)] = again

    def _take_over(
        self, runs: PoolRuns, folder: RunFolder, plan: RunPlan, watch: LaneWatch
    ) -> dict[UUID, _Lane]:
        """The lanes of an earlier run that are at work on this plan; its other lanes are stopped."""
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

    def _submit(
        self, runs: PoolRuns, folder: RunFolder, plan: RunPlan, lane: _Lane, delay: float = 0
    ) -> UUID:
        parameters: dict[str, Any] = {
            "folder": str(folder.root.resolve()),
            "shards": lane.shards,
            "lane": lane.number,
            "device": self._lane_device,
        }
        name = f"lane-{lane.number} {len(lane.shards)} shards"
        tags = (_run_tag(folder), _plan_tag(plan))
        return runs.submit(LANE_DEPLOYMENT, name, parameters, tags=tags, delay=delay)


def lanes_for(seconds: float, lane_seconds: float, num_workers: int) -> int:
    """How many lanes to cut work into.

    A multiple of the workers, so that none idles while others do the last lanes; but no lane of less than a tenth of
    what is asked for, most of which would be its start.

    Args:
        seconds: estimated work.
        lane_seconds: about how long a lane is to work.
        num_workers: workers that are online.
    """
    num_lanes = max(1, math.ceil(seconds / lane_seconds))
    rounded = math.ceil(num_lanes / max(1, num_workers)) * num_workers
    return max(num_lanes, min(rounded, math.floor(10 * seconds / lane_seconds)))


def _delay_after(what: str, failure: LaneFailed | None, state: State[Any], failures: int) -> float:
    """Seconds to wait before what has failed is asked for again.

    Args:
        what: has failed.
        failure: what its journal says, if it has one.
        state: what the server says.
        failures: how often in a row it had failed before.

    Raises:
        VirnucError: its own error, when that is for good or came too often.
    """
    # Without a word in the journal, a process was killed (Crashed), or did not get as far as this code (Failed).
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


def _for_a_worker(config: RunConfig) -> RunConfig:
    """The same for a process that has another working folder and another environment."""

    def absolute(name: str | None) -> str | None:
        return name and absolute_path(name)

    paths = {
        name: absolute(getattr(config, name)) for name in ("esm_model", "dnabert_model", "head", "dna_head")
    }
    return config.model_copy(update={**paths, "switches": env().switches})


def _is_at_work(run: FlowRun) -> bool:
    """Whether a worker has taken a run up, and nobody has asked it to stop."""
    return run.state is not None and (run.state.is_pending() or run.state.is_running())


def _run_tag(folder: RunFolder) -> str:
    """Says which folder a lane works for."""
    return f"virnuc-run:{hashlib.sha256(str(folder.root.resolve()).encode()).hexdigest()[:12]}"


def _plan_tag(plan: RunPlan) -> str:
    """Says which plan a lane works on: `--force` puts another one into the same folder."""
    return f"virnuc-plan:{plan.fingerprint[:12]}"
