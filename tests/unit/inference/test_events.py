"""Reports of lanes from their events; and samples of a lane's GPU."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_lanes import at, done, finished, loaded, started
from virnuc_core.inference.events import GpuSample, lane_report
from virnuc_core.inference.nvidia_smi import sampling_gpu


def test_report_is_of_all_processes_of_a_lane() -> None:
    events = [
        *(at(100.0, started(shards=(0, 1, 2))), at(103.0, loaded()), at(110.0, done(0))),
        *(at(500.0, started(shards=(1, 2))), at(502.0, loaded()), at(507.0, done(1))),
        *(at(512.0, done(2)), at(512.0, finished())),
    ]
    report = lane_report(events)
    assert (report.lane, report.host, report.device) == (0, "box", "cuda:0")
    assert report.device_name == "NVIDIA Made"
    assert (report.started, report.load_seconds, report.seconds) == (100.0, 5.0, 22.0)
    assert [shard.shard for shard in report.shards] == [0, 1, 2]
    report = lane_report(events[:1])  # of a lane that never loaded
    assert (report.device_name, report.load_seconds, report.seconds, report.shards) == ("", 0, 0, ())


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
