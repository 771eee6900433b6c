"""Where a run computes: its lanes on this machine, each of some of its shards on one device."""

import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final
from uuid import UUID

from tasks.lane_log import recording_log
from tasks.lanes import LaneRows, LaneWatch, sampling_gpu
from tasks.stages import compute_shards, computes_here, end_lane_processes, find_pending, plan
from virnuc_core.env_config import env
from virnuc_core.errors import DeviceLostError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.lane_journal import LaneJournal, reporting_outcome
from virnuc_core.inference.launcher import assign_shards, prepare_for_gpus
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

_SECONDS_BETWEEN_POLLS: Final = 0.5

ComputeLane = Callable[..., None]
"""Computes a lane: as `compute_lane`, or the flow `embed_lane`."""

_log = logging.getLogger(__name__)


def lane_journal_name(lane: int, run_id: str | UUID) -> str:
    """Journal of a lane's run."""
    return f"lane-{lane:04d}-{str(run_id)[:8]}"


def compute_lane(
    folder: str,
    shards: tuple[int, ...],
    lane: int,
    device: str,
    num_lanes: int = 1,
    token: str | None = None,
    run_id: str | None = None,
) -> None:
    """Computes some of a run's shards on one device, and keeps a journal and a log of it in the run's folder.

    Arguments are those of the flow `embed_lane`, and the id of its run; without one, an id is made.
    """
    run = RunFolder(Path(folder))
    name = lane_journal_name(lane, run_id or secrets.token_hex(4))
    journal = LaneJournal(run.lane_journal(name))
    alone = computes_here(num_lanes)
    with working_in(run, token, journal, lane), recording_log(run.lane_log(name), alone=alone):
        own = own_device(device)
        with sampling_gpu(own, lane, journal.write):
            compute_shards(run, shards, own, lane, num_lanes, journal)


class WatchedLanes(ABC):
    """Lanes of a run: their journals are followed and shown as progress."""

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
        watch = LaneWatch(folder, [LaneRows(read_plan(folder.plan))])
        self.work(folder, watch)
        hardware = sorted({report.device_name for report in watch.reports if report.device_name})
        if len(hardware) > 1:
            _log.warning(
                "lanes ran on different hardware (%s): the last digits of scores and vectors may differ from those "
                "of a run on one kind",
                ", ".join(hardware),
            )
        return watch.reports


class LocalLanes(WatchedLanes):
    """One lane per device of this machine: threads, each with a process of its own for its device.

    `compute` is the flow `embed_lane` in a flow, whose subflows they are. Otherwise the only lane is this process.
    """

    def __init__(self, devices: tuple[str, ...], compute: ComputeLane = compute_lane) -> None:
        self._devices = devices
        self._compute = compute
        if devices != ("cpu",) and computes_here(len(devices)):  # planning will use the GPU
            prepare_for_gpus()

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
        if computes_here(len(assignments)):
            with _polling(watch):
                self._compute(str(folder.root), assignments[0], 0, self._devices[0])
            return
        with ThreadPoolExecutor(len(assignments), thread_name_prefix="lane") as threads:
            lanes = [
                # A subflow finds its parent in the context.
                threads.submit(
                    copy_context().run,
                    partial(
                        self._compute, str(folder.root), shards, number, device, num_lanes=len(assignments)
                    ),
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
def _polling(watch: LaneWatch) -> Iterator[None]:
    """Polls in a thread while the block computes."""
    done = Event()

    def poll() -> None:
        while True:
            is_last = done.wait(_SECONDS_BETWEEN_POLLS)
            watch.follow_all()
            watch.poll()
            if is_last:
                return

    with ThreadPoolExecutor(1, thread_name_prefix="watch") as thread:
        polls = thread.submit(copy_context().run, poll)
        try:
            yield
        finally:
            done.set()
            wait([polls])
        polls.result()


@contextmanager
def working_in(run: RunFolder, token: str | None, journal: LaneJournal, lane: int) -> Iterator[None]:
    """Opens the journal of a run whose folder this host shares, and records how the block ends."""
    with reporting_outcome(journal):
        if token is not None:
            run.require_token(token)
        with journal, journal.recording_failure(lane):
            yield


def own_device(choice: str) -> str:
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
            "`virnuc server worker`, or with CUDA_VISIBLE_DEVICES",
            len(devices),
        )
    return devices[0]
