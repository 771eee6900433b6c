"""Lanes from the run's side: journals, progress, MLflow runs and GPU samples."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol, Self

from tasks.progress import LaneProgress, current_progress
from tasks.tracking import MetricPoint, Status, TrackedRun, Value
from virnuc_core.env_config import physical_gpu
from virnuc_core.inference.events import (
    GpuSample,
    LaneEvent,
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

# Separates metrics over time from the final ones, by which runs are compared.
PROGRESS: Final = "progress/"
_JOURNALS: Final = "lane-*.jsonl"
_GPU_FIELDS: Final = ("index", "uuid", "utilization.gpu", "memory.used")
_MIB: Final = 2**20
_STATUSES: Final[dict[type[LaneEvent], Status]] = {LaneFinished: "FINISHED", LaneFailed: "FAILED"}

_log = logging.getLogger(__name__)


class LaneObserver(Protocol):
    """Displays or records what lanes do."""

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """The next entry of the journal `name`."""

    def end_poll(self) -> None:
        """No more entries for now."""


class LaneRows:
    """Passes the progress of lanes on; the plan has the rows of each shard."""

    def __init__(self, plan: RunPlan) -> None:
        self._rows = [shard.end - shard.begin for shard in plan.shards]
        self._progress = current_progress()
        self._lanes: dict[int, LaneProgress] = {}
        self._changed: set[int] = set()

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Counts the rows of finished shards."""
        event = entry.event
        before = self._lanes.get(event.lane)
        if isinstance(event, LaneStarted):
            done = before.rows_done if before else 0
            left = sum(self._rows[shard] for shard in event.shards)
            device = event.device if event.host == socket.gethostname() else f"{event.host} {event.device}"
            progress = LaneProgress(lane=event.lane, device=device, rows_done=done, rows_total=done + left)
        elif isinstance(event, ShardDone) and before:
            progress = replace(before, rows_done=before.rows_done + self._rows[event.shard])
        else:
            return
        self._lanes[event.lane] = progress
        self._changed.add(event.lane)

    def end_poll(self) -> None:
        """Shows the lanes that have changed."""
        for lane in sorted(self._changed):
            self._progress.lane(self._lanes[lane])
        self._changed.clear()


class LaneWatch:
    """Tails the journals of a run's lanes, on whatever host they run."""

    def __init__(self, folder: RunFolder, observers: Sequence[LaneObserver] = ()) -> None:
        self._folder = folder
        self._observers = observers
        self._tails: dict[str, JournalTail] = {}
        self._entries: dict[str, list[JournalEntry]] = {}

    def follow(self, name: str, *, skip: bool = False) -> None:
        """Reads a journal, which need not exist yet, from its start, or with `skip` what is added to it."""
        if name in self._entries:
            return
        self._tails[name], self._entries[name] = JournalTail(self._folder.lane_journal(name)), []
        if skip:
            self._tails[name].skip()

    def follow_all(self, *, skip: bool = False) -> None:
        """Follows every lane that has a journal."""
        for path in self._folder.lanes.glob(_JOURNALS):
            self.follow(path.stem, skip=skip)

    def leave(self, name: str) -> None:
        """Reads a journal no more: its lane has ended."""
        self._tails.pop(name, None)

    def poll(self) -> dict[str, list[LaneEvent]]:
        """Passes new entries to the observers, in the order of the journals' names, and returns them."""
        new: dict[str, list[LaneEvent]] = {}
        for name in sorted(self._tails):
            entries = self._entries[name]
            for entry in self._tails[name].read_new():
                if not entries and not isinstance(entry.event, LaneStarted | LaneFailed):
                    continue  # a lane of an earlier run that is being stopped
                entries.append(entry)
                new.setdefault(name, []).append(entry.event)
                for observer in self._observers:
                    observer.on_entry(name, entry)
            if entries and isinstance(entries[-1].event, LaneFinished):
                self.leave(name)
        for observer in self._observers:
            observer.end_poll()
        return new

    def start(self, name: str) -> LaneStarted | None:
        """The last start of a lane's process, if any."""
        starts = [entry.event for entry in self._entries[name] if isinstance(entry.event, LaneStarted)]
        return starts[-1] if starts else None

    def failure(self, name: str) -> LaneFailed | None:
        """The journal's record of what stopped a lane for good, if any."""
        entries = self._entries[name]
        event = entries[-1].event if entries else None
        return event if isinstance(event, LaneFailed) else None

    @property
    def reports(self) -> list[LaneReport]:
        """The work of every started lane, by number."""
        reports = [
            replace(lane_report(entries), journal=name)
            for name, entries in self._entries.items()
            if entries and isinstance(entries[0].event, LaneStarted)
        ]
        return sorted(reports, key=lambda report: (report.lane, report.started))


class LaneTracking:
    """Records each lane in an MLflow child run, and their sum in the run itself, every `every` seconds.

    Leaving the block ends the child runs of lanes that did not end themselves.
    """

    def __init__(self, run: TrackedRun, every: float = 5.0) -> None:
        self._run = run
        self._every = every
        self._next_write = 0.0
        self._lanes: dict[str, _TrackedLane] = {}
        self._points: list[MetricPoint] = []
        self._shards = 0
        self._sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._run.hurry()  # being stopped, with hundreds of lanes perhaps
        self._write()
        lanes = self._lanes.values()
        for lane in lanes:
            lane.end()
        self._run.log_metrics(_gpu_metrics([sample for lane in lanes for sample in lane.gpu_samples]))
        self._run.log_metrics(gpu_use(sum(lane.gpu_seconds for lane in lanes)))
        curves = [(lane.title, lane.curve) for lane in lanes if lane.curve]
        if any(len(curve) > 1 for _, curve in curves) and kind is None:
            self._run.log_figure("throughput", lanes=curves)

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Opens a child run for a new lane; everything else is written later."""
        event = entry.event
        if name not in self._lanes:
            if not isinstance(event, LaneStarted):
                return
            self._lanes[name] = _TrackedLane(self._run, name, entry.time, event)
        self._lanes[name].add(entry)
        if isinstance(event, ShardDone):
            self._shards += 1
            self._sequences += event.counters.frames
            totals: dict[str, float] = {"sequences": self._sequences, "shards": self._shards}
            for lane in self._lanes.values():
                for key, value in lane.speeds.items():
                    totals[key] = totals.get(key, 0.0) + value
            self._points += _points(totals, self._shards, entry.time)

    def end_poll(self) -> None:
        """Writes new values, unless that was just done."""
        if time.monotonic() >= self._next_write:
            self._write()
            self._next_write = time.monotonic() + self._every

    def _write(self) -> None:
        """One request per run with new values."""
        self._run.log_points(self._points)
        self._points = []
        for lane in self._lanes.values():
            lane.write()


class _TrackedLane:
    """One lane and its run in MLflow.

    Attributes:
        speeds: amounts per second, by metric; empty while it does not compute.
        curve: times, and sequences per second.
    """

    def __init__(self, parent: TrackedRun, name: str, begin: float, start: LaneStarted) -> None:
        self.title = f"lane {start.lane} on {start.host} {start.device}"
        self.speeds: dict[str, float] = {}
        self.curve: list[tuple[float, float]] = []
        self.gpu_samples: list[GpuSample] = []
        self._samples_of_earlier_shards = 0
        self._entries: list[JournalEntry] = []
        self._points: list[MetricPoint] = []
        self._is_open = True
        params: dict[str, Value] = {
            "lane": start.lane,
            "host": start.host,
            "device": start.device,
            "shards": len(start.shards),
        }
        self._run = parent.child(self.title, params, {"virnuc.journal": name}, start_time=begin)

    def add(self, entry: JournalEntry) -> None:
        event = entry.event
        if isinstance(event, GpuSample):
            self.gpu_samples.append(event)
            return
        self._entries.append(entry)
        if isinstance(event, ShardDone):
            self._add_shard(entry.time, event)
            return
        self.speeds = {}
        # A restarted lane keeps its first hardware: an MLflow param has one value.
        if isinstance(event, ModelsLoaded) and self._count(ModelsLoaded) == 1:
            self._run.log_params({"device_name": event.device_name})

    @property
    def gpu_seconds(self) -> float:
        """Time for which it has held a GPU."""
        report = lane_report(self._entries)
        return 0.0 if report.device == "cpu" else report.seconds

    def write(self) -> None:
        """Writes new values, and ends the run if the lane has finished."""
        self._run.log_points(self._points)
        self._points = []
        if isinstance(self._entries[-1].event, LaneFinished):
            self.end()

    def end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        report = lane_report(self._entries)
        metrics = {key: value for key, value in lane_row(report).items() if not isinstance(value, str)}
        metrics["starts"] = self._count(LaneStarted)
        work = sum_counters(shard.counters for shard in report.shards)
        self._run.log_metrics({**metrics, **_efficiency(work), **_gpu_metrics(self.gpu_samples)})
        last = self._entries[-1]
        self._run.finish(_STATUSES.get(type(last.event), "KILLED"), last.time)

    def _count(self, kind: type[LaneEvent]) -> int:
        return sum(isinstance(entry.event, kind) for entry in self._entries)

    def _add_shard(self, moment: float, event: ShardDone) -> None:
        self.speeds = speeds(event.counters, event.seconds.forward)
        self.curve.append((moment, self.speeds["sequences_per_second"]))
        samples = self.gpu_samples[self._samples_of_earlier_shards :]
        self._samples_of_earlier_shards = len(self.gpu_samples)
        metrics = {**self.speeds, **_efficiency(event.counters), **_gpu_metrics(samples)}
        self._points += _points(metrics, len(self.curve), moment)


def gpu_use(seconds: float) -> dict[str, float]:
    """GPU hours, for MLflow."""
    return {"gpu_hours": seconds / 3600}


def _gpu_metrics(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Mean utilization (0 to 1) and peak memory in GB; empty without samples."""
    if not samples:
        return {}
    return {
        "gpu_utilization": round(sum(sample.utilization for sample in samples) / len(samples), 4),
        "gpu_memory_gb": max(sample.memory_bytes for sample in samples) / 1e9,
    }


def _efficiency(work: ShardCounters) -> dict[str, float]:
    """Packing efficiency of each model."""
    return {f"{model.family}_packing_efficiency": model.packing_efficiency for model in work.models}


def _points(metrics: Mapping[str, float], step: int, moment: float) -> list[MetricPoint]:
    """Metrics of one moment; the step is the number of finished shards."""
    return [MetricPoint(f"{PROGRESS}{key}", value, step, moment) for key, value in metrics.items()]


@contextmanager
def sampling_gpu(
    device: str, lane: int, write: Callable[[GpuSample], None], every: float = 10.0
) -> Iterator[None]:
    """Samples a lane's GPU every `every` seconds; does nothing on the CPU or without readings from nvidia-smi.

    `write` is called in a separate thread. MLflow's system metrics would show every GPU of the host, and need MLflow
    where the lane runs.
    """
    if device == "cpu":
        yield
        return
    gpu = physical_gpu(int(device.partition(":")[2]))  # nvidia-smi ignores CUDA_VISIBLE_DEVICES
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            found = _sample_gpu(gpu, lane)
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


def _sample_gpu(gpu: str, lane: int) -> GpuSample | None:
    """None for a GPU that does not exist or has no readings, such as a MIG instance."""
    for index, uuid, utilization, memory in query_gpus(_GPU_FIELDS, units=False):
        # A UUID may be abbreviated to a prefix.
        is_it = gpu == index if gpu.isdecimal() else uuid.startswith(gpu)
        if is_it and utilization.isdecimal() and memory.isdecimal():
            return GpuSample(lane=lane, utilization=int(utilization) / 100, memory_bytes=int(memory) * _MIB)
    return None
