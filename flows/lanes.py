"""Lanes: each computes some of a run's shards on one device. Their flows, and those of this machine."""

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect import flow
from prefect.runtime import flow_run

from tasks.artifacts import attach_api_log_handler
from tasks.lane_log import recording_log
from tasks.lanes import LaneRows, LaneTracking, LaneWatch, sampling_gpu
from tasks.stages import compute_shards, end_lane_processes, find_pending, plan
from tasks.tracking import current_run
from virnuc_core.env_config import env
from virnuc_core.errors import DeviceLostError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import LaneJournal, reporting_outcome
from virnuc_core.inference.launcher import assign_shards
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

_SECONDS_BETWEEN_POLLS: Final = 0.5

_log = logging.getLogger(__name__)


def lane_name() -> str:
    """Number and device of a lane, "lane-0-cuda:1", or in a pool its size, "lane-12 9 shards"."""
    parameters: dict[str, Any] = flow_run.parameters
    if parameters.get("token"):
        return f"lane-{parameters['lane']} {len(parameters['shards'])} shards"
    return f"lane-{parameters['lane']}-{parameters['device']}"


def plan_name() -> str:
    """Such as "plan my-results"."""
    return f"plan {Path(flow_run.parameters['folder']).name}"


def lane_journal_name(lane: int, run_id: str | UUID) -> str:
    """Journal of a lane's run."""
    return f"lane-{lane:04d}-{str(run_id)[:8]}"


def plan_journal_name(run_id: str | UUID) -> str:
    """Journal of a planning run."""
    return f"plan-{str(run_id)[:8]}"


@flow(name="embed-lane", flow_run_name=lane_name, persist_result=False)
def embed_lane(
    folder: str, shards: tuple[int, ...], lane: int, device: str, num_lanes: int = 1, token: str | None = None
) -> None:
    """Computes some of a run's shards on one device, and keeps a journal and a log of it in the run's folder.

    Args:
        folder: the run's folder, with its plan and frame store.
        shards: which of the plan's shards; those that are there already are left out.
        lane: number of this lane, from 0.
        device: "cpu" or "cuda:N"; "cuda" is the GPU that this process sees.
        num_lanes: lanes that share this machine's CPU threads with this one, itself included.
        token: that of the run, in a pool: this host must see the same folder.
    """
    attach_api_log_handler()
    run = RunFolder(Path(folder))
    name = lane_journal_name(lane, flow_run.id)
    journal = LaneJournal(run.lane_journal(name))
    with _working_in(run, token, journal, lane), recording_log(run.lane_log(name)):
        own = _own_device(device)
        with sampling_gpu(own, lane, journal.write):
            compute_shards(run, shards, own, lane, num_lanes, journal)


@flow(name="plan-run", flow_run_name=plan_name, persist_result=False)
def plan_run(folder: str, config: RunConfig, kind: Kind, device: str, token: str | None = None) -> None:
    """Plans a run on the hardware that will compute it.

    Args:
        folder: the run's folder, with its frame store.
        config: settings as asked for.
        kind: what the run is to give.
        device: as for `embed_lane`.
        token: as for `embed_lane`.
    """
    attach_api_log_handler()
    run = RunFolder(Path(folder))
    journal = LaneJournal(run.lane_journal(plan_journal_name(flow_run.id)))
    with _working_in(run, token, journal, lane=0):
        own = _own_device(device)
        gpus = query_gpus(["index"], units=False) if device == "cuda" else ()
        host, pid = socket.gethostname(), os.getpid()
        journal.write(
            LaneStarted(lane=0, device=own, host=host, pid=pid, shards=(), devices_of_host=len(gpus) or 1)
        )
        if others := [name for name in env().switches if name not in (config.switches or ())]:
            _log.warning(
                "%s is set for this worker and does not count: set it where the run is asked for",
                ", ".join(others),
            )
        plan(run, config, kind, (own,), token)


class FlowLanes(ABC):
    """Lanes of a flow: their journals are followed, shown as progress and recorded in MLflow."""

    def __init__(self, shown_devices: str) -> None:
        self.shown_devices = shown_devices

    @abstractmethod
    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Makes the plan on the hardware that will compute it."""

    @abstractmethod
    def work(self, folder: RunFolder, watch: LaneWatch) -> None:
        """Computes the missing shards, and polls `watch` meanwhile."""

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards of a planned run and returns a report per lane.

        Raises:
            VirnucError: what stopped a lane.
        """
        with LaneTracking(current_run()) as tracking:
            watch = LaneWatch(folder, [LaneRows(read_plan(folder.plan)), tracking])
            self.work(folder, watch)
        hardware = sorted({report.device_name for report in watch.reports if report.device_name})
        if len(hardware) > 1:
            _log.warning(
                "lanes ran on different hardware (%s): the last digits of scores and vectors may differ from those "
                "of a run on one kind",
                ", ".join(hardware),
            )
        return watch.reports


class LocalLanes(FlowLanes):
    """One lane per device of this machine: subflows in threads, each with a process of its own for its device."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        super().__init__(",".join(devices))
        self._devices = devices

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Plans in this process."""
        return plan(folder, config, kind, self._devices)

    def work(self, folder: RunFolder, watch: LaneWatch) -> None:
        """Assigns the pending shards to lanes and waits for all of them, even when one fails."""
        pending = find_pending(folder)
        assignments = assign_shards(read_plan(folder.plan), pending, len(self._devices))
        if not assignments:
            return
        watch.follow_all(skip=True)
        with ThreadPoolExecutor(len(assignments), thread_name_prefix="lane") as threads:
            lanes = [
                # A subflow finds its parent in the context.
                threads.submit(
                    copy_context().run,
                    partial(embed_lane, str(folder.root), shards, number, device, num_lanes=len(assignments)),
                )
                for number, (shards, device) in enumerate(zip(assignments, self._devices, strict=False))
            ]
            try:
                while wait(lanes, timeout=_SECONDS_BETWEEN_POLLS).not_done:
                    watch.follow_all()
                    watch.poll()
            except BaseException:
                # This thread is being stopped, and the lanes' threads wait for their processes.
                end_lane_processes()
                raise
        watch.follow_all()
        watch.poll()
        failed = [lane for lane in lanes if lane.exception() is not None]
        if failed:
            _log.error(
                "%d of %d lanes failed, and %d of %d shards are missing; those that are finished are kept: "
                "run the same command again to go on",
                len(failed),
                len(lanes),
                len(missing_shards(folder, pending)),
                len(pending),
            )
            failed[0].result()


@contextmanager
def _working_in(run: RunFolder, token: str | None, journal: LaneJournal, lane: int) -> Iterator[None]:
    """Opens the journal of a run whose folder this host shares, and records how the block ends."""
    with reporting_outcome(journal):
        if token is not None:
            run.require_token(token)
        with journal, journal.recording_failure(lane):
            yield


def _own_device(choice: str) -> str:
    """The device of a lane or a plan; DeviceLostError if that is a GPU and this process sees none."""
    if choice != "cuda":
        return choice
    devices = resolve_devices(("auto",))
    if devices == ("cpu",):
        raise DeviceLostError(
            f"this run is planned for GPUs, and {socket.gethostname()} shows none to this worker "
            f"(CUDA_VISIBLE_DEVICES {','.join(env().cuda_visible_devices or ()) or 'not set'}): see whether nvidia-smi "
            "lists it, and end the worker until it does."
        )
    if len(devices) > 1:
        _log.warning(
            "this process sees %d GPUs and uses the first: a worker has one GPU when it is started by "
            "`virnuc worker`, or with CUDA_VISIBLE_DEVICES",
            len(devices),
        )
    return devices[0]
