"""Lanes in MLflow: a run for each inside that of the pipeline, with figures over time, and their sum in the latter.

Lanes know nothing of it: it is the parent that hears them and writes.
"""

import time
from collections.abc import Mapping
from typing import Final, Self

from tasks.plots import throughput_figure
from tasks.tracking import MetricPoint, Status, TrackedRun, Value
from virnuc_core.inference.events import (
    GpuSample,
    LaneFailed,
    LaneFinished,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
)
from virnuc_core.inference.lane_journal import JournalEntry, lane_report
from virnuc_core.results.run_json import lane_row, speeds
from virnuc_core.shard_file import ShardCounters, sum_counters

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
