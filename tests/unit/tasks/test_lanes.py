"""Progress and reports from lane journals; and GPU samples."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.lanes import (
    LaneRows,
    LaneWatch,
    sampling_gpu,
)
from tasks.progress import LaneProgress, use_progress
from tests.made_lanes import at, done, failed, finished, loaded, started
from tests.made_models import MadeRun
from virnuc_core.inference.events import GpuSample, LaneEvent, LaneStarted
from virnuc_core.inference.lane_journal import JournalEntry, LaneJournal
from virnuc_core.run_folder import RunFolder


class Recorder:
    """A progress display and lane observer that records its calls."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def stage(self, name: str) -> None:
        self.seen.append(name)

    def lane(self, progress: LaneProgress) -> None:
        self.seen.append(progress)

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        self.seen.append((name, entry.event))

    def end_poll(self) -> None:
        self.seen.append(None)


def test_journals_become_progress(finished_run: MadeRun) -> None:
    rows = [shard.end - shard.begin for shard in finished_run.plan.shards]
    total = rows[0] + rows[1]
    recorder = Recorder()
    with use_progress(recorder):
        lanes = LaneRows(finished_run.plan)

    def shown(*events: LaneEvent) -> tuple[str, int, int]:
        for event in events:
            lanes.on_entry("lane-0002-a", at(0.0, event))
        lanes.end_poll()
        [progress] = recorder.seen
        recorder.seen.clear()
        assert isinstance(progress, LaneProgress)
        assert progress.lane == 2
        return progress.device, progress.rows_done, progress.rows_total

    here = LaneStarted(lane=2, device="cpu", host=socket.gethostname(), pid=1, shards=(0, 1))
    assert shown(here) == ("cpu", 0, total)
    assert shown(loaded(2), done(0, 2)) == ("cpu", rows[0], total)
    assert shown(started(2, host="node1.", shards=(1,))) == ("node1. cuda:0", rows[0], total)
    assert shown(done(1, 2)) == ("node1. cuda:0", total, total)
    lanes.end_poll()
    assert recorder.seen == []


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write(folder: RunFolder, name: str, *events: LaneEvent) -> None:
    with LaneJournal(folder.lane_journal(name)) as journal:
        for event in events:
            journal.write(event)


def test_journals_are_followed_as_they_come_and_grow(folder: RunFolder) -> None:
    recorder = Recorder()
    watch = LaneWatch(folder, [recorder])
    watch.follow("lane-0000-a")
    watch.follow("lane-0001-b")
    assert watch.poll() == {}
    write(folder, "lane-0001-b", started(1))
    write(folder, "lane-0000-a", started(), done(0), finished())
    write(folder, "lane-0002-c", started(2))  # of another run
    assert list(watch.poll()) == ["lane-0000-a", "lane-0001-b"]
    write(folder, "lane-0001-b", loaded(1))
    write(folder, "lane-0000-a", done(1))  # a lane that has finished is not read again
    assert watch.poll() == {"lane-0001-b": [loaded(1)]}
    watch.leave("lane-0001-b")
    write(folder, "lane-0001-b", done(1))
    assert watch.poll() == {}
    first = [("lane-0000-a", event) for event in (started(), done(0), finished())]
    second = [("lane-0001-b", event) for event in (started(1), loaded(1))]
    assert recorder.seen == [None, *first, second[0], None, second[1], None, None]
    assert [len(report.shards) for report in watch.reports] == [1, 0]


def test_entries_of_earlier_runs_are_skipped(folder: RunFolder) -> None:
    write(folder, "lane-0000-old", started(), failed())
    write(folder, "lane-0002-same", started(2), done(0, 2))
    recorder = Recorder()
    watch = LaneWatch(folder, [recorder])
    watch.follow_all(skip=True)
    write(folder, "lane-0000-old", done(0))  # being stopped
    write(folder, "lane-0002-same", started(2, host="other"), done(1, 2))  # the same flow run, retried
    write(folder, "lane-0003-new", started(3))
    watch.follow_all()
    watch.poll()
    assert recorder.seen == [
        *(("lane-0002-same", started(2, host="other")), ("lane-0002-same", done(1, 2))),
        *(("lane-0003-new", started(3)), None),
    ]
    assert [len(report.shards) for report in watch.reports] == [1, 0]


def test_start_and_failure_are_the_last_of_a_lane(folder: RunFolder) -> None:
    watch = LaneWatch(folder)
    write(folder, "lane-0000-a", started(), failed())
    write(folder, "lane-0001-b", started(), failed(), started(host="other"), finished())
    write(folder, "lane-0002-c", failed())
    names = ["lane-0000-a", "lane-0001-b", "lane-0002-c", "lane-0003-d"]
    for name in names:
        watch.follow(name)
    watch.poll()
    assert [watch.failure(name) for name in names] == [failed(), None, failed(), None]
    assert [watch.start(name) for name in names] == [started(), started(host="other"), None, None]
    assert len(watch.reports) == 2


@pytest.mark.parametrize(
    ("visible", "device", "every", "expected"),
    [
        (None, "cuda:1", 0.01, "samples"),
        ("1", "cuda:0", 0.01, "samples"),
        ("2,GPU-1b", "cuda:1", 0.01, "samples"),
        ("GPU-1bbb", "cuda:0", 0.01, "samples"),
        ("2", "cuda:0", 0.01, "asked once"),
        ("9", "cuda:0", 0.01, "asked once"),
        ("MIG-77", "cuda:0", 0.01, "asked once"),
        (None, "cpu", 0.01, "not asked"),
        (None, "cuda:0", 60.0, "not asked"),
    ],
)
def test_gpu_of_the_lane_is_sampled(
    tmp_path: Path,
    set_env: Callable[..., None],
    visible: str | None,
    device: str,
    every: float,
    expected: str,
) -> None:
    """With a stand-in for nvidia-smi; a short lane does not wait for its first sample."""
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    gpus = r"0, GPU-0aaa, 10, 100\n1, GPU-1bbb, 37, 2048\n2, GPU-2ccc, [N/A], 5\n"
    program.write_text(f"#!/bin/sh\necho asked >> {asked}\nprintf '{gpus}'\n")
    program.chmod(0o755)
    visibility = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    set_env(PATH=f"{tmp_path}:{os.environ['PATH']}", **visibility)
    samples: list[GpuSample] = []
    with sampling_gpu(device, 3, samples.append, every=every):
        deadline = time.monotonic() + (10.0 if expected == "samples" else 0.3)
        while len(samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    times_asked = asked.read_text().count("asked") if asked.exists() else 0
    if expected == "samples":
        assert len(samples) >= 2
        assert set(samples) == {GpuSample(lane=3, utilization=0.37, memory_bytes=2048 * 2**20)}
    else:
        assert (samples, times_asked) == ([], 1 if expected == "asked once" else 0)
