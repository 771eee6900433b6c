"""The lanes of this machine: each computes some of a run's shards on one device.

Several lanes have a process each, which imports what it needs while the inputs are indexed. So may the only lane; else it is this
process. Either way the models may stay loaded for the next run.
"""

import ctypes
import heapq
import logging
import os
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Final, Self

import torch

from virnuc_core.env_config import available_threads
from virnuc_core.errors import DeviceLostError, LaneError, UsageError
from virnuc_core.inference.events import (
    LaneEvent,
    LaneFinished,
    LaneReport,
    LaneStarted,
    lane_report,
)
from virnuc_core.inference.lane_process import (
    LaneProcess,
    Observer,
    lane_error,
    lane_started,
    prepare_for_gpus,
    take_started,
)
from virnuc_core.inference.nvidia_smi import sampling_gpu
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.runner import LoadedModels, run_shards
from virnuc_core.inference.shard import missing_shards, remove_shard_temporaries
from virnuc_core.retries import retrying
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

# Devices that compute, and for which `LocalLanes` of this process: threads of different ones would share settings of
# torch, memory of the device and tables of the kernels. Guarded by `_changed`.
_busy: Final[dict[str, "LocalLanes"]] = {}
_changed: Final = threading.Condition()
# Once a GPU failed in this process, CUDA computes on none any more; child processes can.
_lost_device: Final = threading.Event()

_log = logging.getLogger(__name__)


def ignore(event: LaneEvent) -> None:
    """Observes nothing."""


def assign_shards(plan: RunPlan, indices: Sequence[int], num_lanes: int) -> tuple[tuple[int, ...], ...]:
    """Assigns shards to lanes for equal finish times: by falling cost, each to the least loaded lane.

    Returns the shards of each lane in row order; lanes without work are left out.
    """
    loads = [(0.0, lane) for lane in range(num_lanes)]
    assigned: list[list[int]] = [[] for _ in loads]
    for index in sorted(indices, key=lambda i: (-plan.shards[i].cost, i)):
        load, lane = heapq.heappop(loads)
        assigned[lane].append(index)
        heapq.heappush(loads, (load + plan.shards[index].cost, lane))
    return tuple(tuple(sorted(lane)) for lane in assigned if lane)


class LocalLanes:
    """A lane per device of this machine; a context manager, which closes them.

    May be used by several threads: a run takes the devices that no other run uses, and waits while there are none. Results
    are the same whatever was computed before.

    Args:
        devices: resolved: "cpu", or "cuda:0", "cuda:1", ...
        observe: is told of every event, by one thread after another.
        keep: the models stay loaded for the next run, until the lanes are closed.
        in_processes: also the only lane has a process of its own.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        observe: Observer = ignore,
        *,
        keep: bool = False,
        in_processes: bool = False,
    ) -> None:
        self.devices = devices
        self._observe = observe
        self._telling = threading.Lock()
        self._keep = keep
        self._in_processes = in_processes or len(devices) > 1
        self._lanes: dict[str, _LaneHere | LaneProcess] = {}
        self._making = threading.Lock()
        self._before: dict[RunConfig, RunPlan] = {}
        self._planning = threading.Lock()
        self._is_closed = False
        self._process = os.getpid()
        started = take_started(devices if self._in_processes else ())
        if self._in_processes:
            self._lanes |= {
                device: started.get(device) or LaneProcess(device, len(devices)) for device in devices
            }
        elif devices[0].startswith("cuda"):  # planning will use the GPU
            prepare_for_gpus()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Writes the plan of a run, or checks that the one in its folder is of the same run.

        From an earlier run with this configuration are kept the token budgets, since the models have taken memory
        meanwhile, and where the models are, of which the hub may have newer ones.

        Raises:
            UsageError: the lanes are closed, or of another process.
            DeviceLostError: a GPU failed in this process before.
            VirnucError: as `open_plan`.
        """
        self._require_usable()
        if self.devices[0].startswith("cuda") and _lost_device.is_set():
            raise DeviceLostError(
                "a GPU failed, and this process can no longer use any: restart it (in a notebook, the kernel)."
            )
        store, is_new = FrameStore.open(folder.frames), not folder.plan.exists()
        with self._planning:
            before = self._before.get(config)
            asked = _with_locations(config, before)
            make = partial(open_plan, asked, store, kind, self.devices, folder, before=before)
            plan = retrying("plan", make)
            if is_new:
                self._before[config] = plan
        return plan

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards of a planned run, when devices are free; no other process may work in the folder.

        All lanes are waited for, even when one fails. If this thread is interrupted, so are they.

        Raises:
            UsageError: the lanes are closed, or of another process.
            VirnucError: a lane failed; finished shards are kept.
        """
        plan = read_plan(folder.plan)
        every = range(len(plan.shards))
        pending = retrying("the list of shards", partial(missing_shards, folder, every))
        remove_shard_temporaries(folder, every)
        devices = self._take(len(pending)) if pending else []
        try:
            futures = self._side_by_side(folder, assign_shards(plan, pending, len(devices)), devices)
        finally:
            self._give_back(devices)
        _log_failures(futures, folder, pending)
        found = [report for future in futures if (report := future.result()) is not None]
        warn_of_mixed_hardware(found)
        return found

    def compute_lane(
        self,
        folder: RunFolder,
        shards: tuple[int, ...],
        lane: int,
        device: str,
        stopping: threading.Event | None = None,
    ) -> LaneReport | None:
        """Computes the missing ones of some shards on a device, again after errors that may not recur.

        Once `stopping` is set, nothing is repeated, and the lane of this process ends after its batch. Returns None if nothing
        was missing.
        """
        stopping = stopping or threading.Event()
        events: list[LaneEvent] = []

        def emit(event: LaneEvent) -> None:
            with self._telling:
                events.append(event)
                self._observe(event)

        def run() -> None:
            left = missing_shards(folder, shards)
            if not left:
                return
            made = self._lane(device, stopping)
            try:
                made.run(folder, left, lane, emit)
            except BaseException as error:
                # An interrupt leaves the models of this process as they are.
                if isinstance(made, LaneProcess) or isinstance(error, Exception):
                    self._end(device)
                raise

        sampling = nullcontext() if self._keep else sampling_gpu(device, lane, emit)
        try:
            with sampling:
                retrying(f"lane {lane} on {device}", run, stopping)
        finally:
            if not self._keep:
                self._end(device)
        return lane_report(events) if any(isinstance(event, LaneStarted) for event in events) else None

    def close(self) -> None:
        """Waits for runs under way, and frees the memory of the devices; may be called again."""
        if self._process != os.getpid():
            return
        with _changed:
            self._is_closed = True
            _changed.notify_all()
            _changed.wait_for(lambda: self not in _busy.values())
        for device in self.devices:
            self._end(device)

    def _side_by_side(
        self, folder: RunFolder, assigned: Sequence[tuple[int, ...]], devices: Sequence[str]
    ) -> list[Future[LaneReport | None]]:
        """Computes each lane's shards in a thread with the context of this one, but none of its settings of torch."""
        stopping = threading.Event()
        with ThreadPoolExecutor(len(self.devices), thread_name_prefix="lane") as threads:
            try:
                futures = [
                    threads.submit(
                        copy_context().run,
                        self.compute_lane,
                        folder,
                        shards,
                        lane,
                        device,
                        stopping,
                    )
                    for lane, (shards, device) in enumerate(zip(assigned, devices, strict=False))
                ]
                wait(futures)
            except BaseException:
                stopping.set()
                with self._making:
                    for device in devices:
                        if isinstance(made := self._lanes.get(device), LaneProcess):
                            made.kill()
                raise
        return futures

    def _lane(self, device: str, stopping: threading.Event) -> "_LaneHere | LaneProcess":
        """The lane of a device, made if there is none that can compute."""
        in_process = self._in_processes or _lost_device.is_set()
        with self._making:
            if stopping.is_set():
                raise LaneError("the run is being stopped.")
            made = self._lanes.get(device)
            if isinstance(made, LaneProcess) and not made.is_alive:
                made.close()
                made = None
            if made is None or (in_process and isinstance(made, _LaneHere)):
                made = LaneProcess(device, len(self.devices)) if in_process else _LaneHere(device)
                self._lanes[device] = made
            if isinstance(made, _LaneHere):
                made.models.stopping = stopping
        return made

    def _end(self, device: str) -> None:
        with self._making:
            made = self._lanes.pop(device, None)
        if made is not None:
            made.close()

    def _take(self, most: int) -> list[str]:
        """Waits until devices are free, and takes these."""
        with _changed:
            _changed.wait_for(lambda: self._is_closed or not _busy.keys() >= set(self.devices))
            self._require_usable()
            taken = [name for name in self.devices if name not in _busy][:most]
            _busy.update(dict.fromkeys(taken, self))
        return taken

    def _give_back(self, devices: Iterable[str]) -> None:
        with _changed:
            for device in devices:
                _busy.pop(device, None)
            _changed.notify_all()
            for device in () if self._keep else set(self.devices) - _busy.keys():
                self._end(device)

    def _require_usable(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"these models were loaded in process {self._process}, not in its child {os.getpid()}: load them where they "
                "are used."
            )
        if self._is_closed:
            raise UsageError("these models are closed: load them again.")


def _log_failures(
    lanes: Sequence[Future[LaneReport | None]], folder: RunFolder, shards: Sequence[int]
) -> None:
    num_failed = sum(lane.exception() is not None for lane in lanes)
    if num_failed and len(lanes) > 1:
        _log.error(
            "%d of %d lanes failed, and %d of %d shards are missing; finished shards are kept: "
            "run the same command again to resume",
            num_failed,
            len(lanes),
            len(missing_shards(folder, shards)),
            len(shards),
        )


def warn_of_mixed_hardware(reports: Iterable[LaneReport]) -> None:
    """Says if lanes ran on more than one kind of hardware."""
    hardware = sorted({report.device_name for report in reports if report.device_name})
    if len(hardware) > 1:
        _log.warning(
            "lanes ran on different hardware (%s): the last digits of scores and embeddings may differ from those of a run on "
            "one type",
            ", ".join(hardware),
        )


def _with_locations(config: RunConfig, before: RunPlan | None) -> RunConfig:
    """A configuration with the locations of its models for their names, unless a bundled head goes by these."""
    if before is None or (before.kind == "predict" and config.head is None):
        return config
    models = {"esm_model": before.model("esm2"), "dnabert_model": before.model("dnabert_s")}
    return config.model_copy(update={name: model.location for name, model in models.items() if model})


class _LaneHere:
    """The lane of this process."""

    def __init__(self, device: str) -> None:
        self.models = LoadedModels(device)

    def run(self, folder: RunFolder, shards: Sequence[int], lane: int, emit: Observer) -> None:
        """Computes shards, with the settings of a lane's process.

        Raises:
            DeviceLostError: the GPU failed; what was on the device stays there.
        """
        device = self.models.device
        try:
            with nullcontext() if device.startswith("cuda") else _using_threads():
                emit(lane_started(read_plan(folder.plan), shards, lane, device, os.getpid()))
                run_shards(folder, shards, self.models, lane, emit)
                emit(LaneFinished(lane=lane))
        except Exception as error:
            lost = lane_error(error, lane) if isinstance(error, RuntimeError) else None
            if isinstance(lost, DeviceLostError):
                _lost_device.set()
                # Its traceback holds tensors on the device. Freeing them there, even when the process ends, would abort it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
                raise lost from error
            _clear_frames(error)
            raise

    def close(self) -> None:
        """Drops the models, and returns their memory to the device."""
        if not _lost_device.is_set():
            self.models.close()


@contextmanager
def _using_threads() -> Iterator[None]:
    """Gives torch the thread count of a lane's process."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _clear_frames(error: BaseException | None) -> None:
    """Drops what the functions that an error went through refer to: notebooks keep the last error, and with it models."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
