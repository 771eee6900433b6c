"""Lanes as their run sees them: their journals, GPU samples, progress and MLflow runs."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, Self

from tasks.pages.plots import throughput_figure
from tasks.tracking import MetricPoint, Status, TrackedRun, Value
from virnuc_core.env_config import physical_gpu
from virnuc_core.inference.events import (
    GpuSample,
    LaneFailed,
    LaneFinished,
    LaneReport,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
)
from virnuc_core.inference.lane_journal import JournalEntry, JournalTail, lane_report
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.shard import ShardCounters, sum_counters
from virnuc_core.results.run_json import lane_row, speeds
from virnuc_core.run_folder import RunFolder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneProgress:
    """How far one lane is.

    Attributes:
        lane: number of the lane, from 0.
        device: where it computes.
        rows_done: rows (frames or sequences) finished in this run.
        rows_total: rows this lane has to do in this run.
    """

    lane: int
    device: str
    rows_done: int
    rows_total: int


class Progress(Protocol):
    """Something that shows how far a run is."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def lane(self, progress: LaneProgress) -> None:
        """A lane has begun, or has finished a shard."""


class LoggedProgress:
    """Progress as log lines, for runs that nobody watches from a terminal."""

    def stage(self, name: str) -> None:
        """Logs the name."""
        _log.info("stage: %s", name)

    def lane(self, progress: LaneProgress) -> None:
        """Logs the count."""
        _log.info(
            "lane %d on %s: %d of %d rows",
            progress.lane,
            progress.device,
            progress.rows_done,
            progress.rows_total,
        )


# A context variable and not a parameter: the parameters of a flow are recorded, and this is not one of them.
_current: ContextVar[Progress] = ContextVar("progress", default=LoggedProgress())  # noqa: B039 (immutable)


def current_progress() -> Progress:
    """Whom to tell."""
    return _current.get()


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Tells `progress` about the runs inside the block."""
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)


class LaneRows:
    """Makes progress of what lanes write in their journals.

    Args:
        plan: says how many rows a shard has.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._rows = [shard.end - shard.begin for shard in plan.shards]
        self._progress = current_progress()
        self._lanes: dict[int, LaneProgress] = {}
        self._changed: set[int] = set()

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Takes in that a lane has begun, or has finished a shard."""
        event = entry.event
        before = self._lanes.get(event.lane)
        if isinstance(event, LaneStarted):
            done = before.rows_done if before else 0
            left = sum(self._rows[shard] for shard in event.shards)
            where = event.device if event.host == socket.gethostname() else f"{event.host} {event.device}"
            progress = LaneProgress(lane=event.lane, device=where, rows_done=done, rows_total=done + left)
        elif isinstance(event, ShardDone) and before:
            progress = replace(before, rows_done=before.rows_done + self._rows[event.shard])
        else:
            return
        self._lanes[event.lane] = progress
        self._changed.add(event.lane)

    def end_poll(self) -> None:
        """Tells how far the lanes are about which there was news."""
        for lane in sorted(self._changed):
            self._progress.lane(self._lanes[lane])
        self._changed.clear()


_JOURNALS: Final = "lane-*.jsonl"


class LaneObserver(Protocol):
    """Something that shows or records what lanes do."""

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Hears the next entry of the journal with this name."""

    def end_poll(self) -> None:
        """Has heard everything that is new for now."""


class LaneWatch:
    """Hears the lanes of one run; what earlier runs left in its folder is passed over.

    Args:
        folder: the run's folder.
        observers: who is told, in this order.
    """

    def __init__(self, folder: RunFolder, observers: Sequence[LaneObserver] = ()) -> None:
        self._folder = folder
        self._observers = observers
        self._tails: dict[str, JournalTail] = {}
        self._heard: dict[str, list[JournalEntry]] = {}
        for path in folder.lanes.glob(_JOURNALS):
            self._tail(path).skip()

    def adopt(self, name: str) -> None:
        """Hears a lane of an earlier run from its beginning, because it works for this one now."""
        self._tails[name] = JournalTail(self._folder.lane_journal(name))

    def poll(self) -> None:
        """Tells the observers what is new."""
        for path in sorted(self._folder.lanes.glob(_JOURNALS)):
            entries = self._heard.setdefault(path.stem, [])
            if entries and isinstance(entries[-1].event, LaneFinished):
                continue
            for entry in self._tail(path).read_new():
                if not entries and not isinstance(entry.event, LaneStarted | LaneFailed):
                    continue  # a lane of an earlier run, on its way out
                entries.append(entry)
                for observer in self._observers:
                    observer.on_entry(path.stem, entry)
        for observer in self._observers:
            observer.end_poll()

    def failure(self, name: str) -> LaneFailed | None:
        """What stopped a lane for good, if its journal tells."""
        entries = self._heard.get(name)
        event = entries[-1].event if entries else None
        return event if isinstance(event, LaneFailed) else None

    @property
    def reports(self) -> list[LaneReport]:
        """The work of every lane that was heard, by its number."""
        begun = [heard for heard in self._heard.values() if heard and isinstance(heard[0].event, LaneStarted)]
        return sorted(map(lane_report, begun), key=lambda report: (report.lane, report.started))

    def _tail(self, path: Path) -> JournalTail:
        return self._tails.setdefault(path.stem, JournalTail(path))


# Sets figures over time apart from the final ones, which runs are compared by.
PROGRESS: Final = "progress/"


class LaneTracking:
    """Hears lanes and records them; leaving its block ends the records of lanes that did not end themselves.

    Args:
        run: the run that the lanes work for.
        every: seconds between writes.
    """

    def __init__(self, run: TrackedRun, every: float = 5.0) -> None:
        self._run = run
        self._every = every
        self._not_before = 0.0
        self._lanes: dict[str, _Lane] = {}
        self._points: list[MetricPoint] = []
        self._gpu = _GpuUse()
        self._shards = 0
        self._sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        for lane in self._lanes.values():
            lane.end()
        if figures := self._gpu.figures:
            self._run.log_metrics(figures)
        curves = [(lane.title, lane.curve) for lane in self._lanes.values() if lane.curve]
        if curves and self._run.run_id is not None:
            self._run.log_figure("throughput", throughput_figure(curves))

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Takes in what a lane told; a new lane gets its run, and all else is written later."""
        if name not in self._lanes and isinstance(entry.event, LaneStarted):
            self._lanes[name] = _Lane(self._run, name, entry.time, entry.event)
        if name not in self._lanes:
            return
        self._lanes[name].hear(entry)
        if isinstance(entry.event, ShardDone):
            self._add_totals(entry.time, entry.event)
        elif isinstance(entry.event, GpuSample):
            self._gpu.add(entry.event)

    def end_poll(self) -> None:
        """Writes what the lanes have told, unless that was done just now."""
        if time.monotonic() >= self._not_before:
            self._write()
            self._not_before = time.monotonic() + self._every

    def _write(self) -> None:
        """Takes one request for each run that has news."""
        if self._points:
            self._run.log_points(self._points)
            self._points = []
        for lane in self._lanes.values():
            lane.write()

    def _add_totals(self, moment: float, event: ShardDone) -> None:
        self._shards += 1
        self._sequences += event.counters.frames
        figures: dict[str, float] = {}
        for lane in self._lanes.values():
            for key, value in lane.speeds.items():
                figures[key] = figures.get(key, 0.0) + value
        figures |= {"sequences": self._sequences, "shards": self._shards}
        self._points += _points(figures, self._shards, moment)


class _GpuUse:
    """Samples of GPUs, summed up."""

    def __init__(self) -> None:
        self._samples = 0
        self._utilization = 0.0
        self._memory_bytes = 0

    def add(self, sample: GpuSample) -> None:
        """Takes in one sample."""
        self._samples += 1
        self._utilization += sample.utilization
        self._memory_bytes = max(self._memory_bytes, sample.memory_bytes)

    @property
    def figures(self) -> dict[str, float]:
        """Mean utilization (0 to 1) and highest memory in GB; nothing without samples."""
        if not self._samples:
            return {}
        return {
            "gpu_utilization": round(self._utilization / self._samples, 4),
            "gpu_memory_gb": self._memory_bytes / 1e9,
        }


class _Lane:
    """One lane and its run in MLflow.

    Attributes:
        title: what a person calls it.
        speeds: what it does in a second; nothing while it is not at work.
        curve: moments and sequences a second.
    """

    def __init__(self, parent: TrackedRun, name: str, begin: float, start: LaneStarted) -> None:
        self.title = f"lane {start.lane} on {start.host} {start.device}"
        self.speeds: dict[str, float] = {}
        self.curve: list[tuple[float, float]] = []
        self._gpu = _GpuUse()
        self._gpu_in_shard = _GpuUse()
        self._entries: list[JournalEntry] = []
        self._points: list[MetricPoint] = []
        self._shards = 0
        self._status: Status = "KILLED"
        self._is_open = True
        params: dict[str, Value] = {
            "lane": start.lane,
            "host": start.host,
            "device": start.device,
            "shards": len(start.shards),
        }
        self._run = parent.child(self.title, params, {"virnuc.journal": name}, start_time=begin)

    def hear(self, entry: JournalEntry) -> None:
        """Takes in what the lane told."""
        event = entry.event
        if isinstance(event, GpuSample):
            self._gpu.add(event)
            self._gpu_in_shard.add(event)
            return
        self._entries.append(entry)
        if isinstance(event, ShardDone):
            self._add_shard(entry.time, event)
            return
        self.speeds = {}
        if isinstance(event, ModelsLoaded):
            # A lane that was started again keeps the hardware that it was first on: a setting has one value.
            if not any(isinstance(known.event, ModelsLoaded) for known in self._entries[:-1]):
                self._run.log_params({"device_name": event.device_name})
        elif isinstance(event, LaneFailed):
            self._status = "FAILED"
        elif isinstance(event, LaneFinished):
            self._status = "FINISHED"

    def write(self) -> None:
        """Writes what it told, and ends its run if it has finished."""
        if self._points:
            self._run.log_points(self._points)
            self._points = []
        if self._status == "FINISHED":
            self.end()

    def end(self) -> None:
        """Ends its run with its final figures."""
        if not self._is_open:
            return
        self._is_open = False
        report = lane_report(self._entries)
        figures = {key: value for key, value in lane_row(report).items() if not isinstance(value, str)}
        figures["starts"] = sum(isinstance(entry.event, LaneStarted) for entry in self._entries)
        work = sum_counters(shard.counters for shard in report.shards)
        self._run.log_metrics({**figures, **_efficiency(work), **self._gpu.figures})
        self._run.finish(self._status, self._entries[-1].time)

    def _add_shard(self, moment: float, event: ShardDone) -> None:
        self._shards += 1
        self.speeds = speeds(event.counters, event.seconds.forward)
        self.curve.append((moment, self.speeds["sequences_per_second"]))
        figures = {**self.speeds, **_efficiency(event.counters), **self._gpu_in_shard.figures}
        self._points += _points(figures, self._shards, moment)
        self._gpu_in_shard = _GpuUse()


def _efficiency(work: ShardCounters) -> dict[str, float]:
    """Packing efficiency of each model."""
    return {f"{model.family}_packing_efficiency": model.packing_efficiency for model in work.models}


def _points(figures: Mapping[str, float], step: int, moment: float) -> list[MetricPoint]:
    """Figures of one moment; the steps of a run are its finished shards."""
    return [
        MetricPoint(key=f"{PROGRESS}{key}", value=value, step=step, time=moment)
        for key, value in figures.items()
    ]


_FIELDS: Final = ("index", "uuid", "utilization.gpu", "memory.used")
_MIB: Final = 2**20


@contextmanager
def sampling_gpu(
    device: str, lane: int, write: Callable[[GpuSample], None], every: float = 10.0
) -> Iterator[None]:
    """Samples the GPU of a lane during the block; does nothing on the CPU or where nvidia-smi does not tell.

    Args:
        device: "cpu" or "cuda:N", as this process sees it.
        lane: number of the lane.
        write: is given every sample, in a thread of its own.
        every: seconds between samples.
    """
    if device == "cpu":
        yield
        return
    # As nvidia-smi knows it, which does not mind CUDA_VISIBLE_DEVICES.
    gpu = physical_gpu(int(device.partition(":")[2]))
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            found = _ask(gpu, lane)
            if found is None:
                _log.info("nvidia-smi does not tell what GPU %s does: it is not recorded", gpu)
                return
            write(found)

    thread = threading.Thread(target=sample, name=f"gpu-samples-{lane}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ask(gpu: str, lane: int) -> GpuSample | None:
    """One sample; None when there is no such GPU, or it does not tell, as parts of a divided GPU do not."""
    for index, uuid, utilization, memory in query_gpus(_FIELDS, units=False):
        # A UUID may be given by its beginning.
        is_it = gpu == index if gpu.isdecimal() else uuid.startswith(gpu)
        if is_it and utilization.isdecimal() and memory.isdecimal():
            return GpuSample(lane=lane, utilization=int(utilization) / 100, memory_bytes=int(memory) * _MIB)
    return None
