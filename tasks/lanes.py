"""Lanes from the run's side: journals, progress and GPU samples."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol

from tasks.progress import LaneProgress, current_progress
from virnuc_core.env_config import physical_gpu
from virnuc_core.inference.events import (
    GpuSample,
    LaneEvent,
    LaneFailed,
    LaneFinished,
    LaneReport,
    LaneStarted,
    ShardDone,
)
from virnuc_core.inference.lane_journal import JournalEntry, JournalTail, lane_report
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import RunPlan
from virnuc_core.run_folder import RunFolder

_JOURNALS: Final = "lane-*.jsonl"
_GPU_FIELDS: Final = ("index", "uuid", "utilization.gpu", "memory.used")
_MIB: Final = 2**20

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
