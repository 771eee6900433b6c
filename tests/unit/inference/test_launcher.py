"""Lanes: real processes, their events, their log, and how they end."""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import DeviceLostError, VirnucError
from virnuc_core.inference import launcher, worker
from virnuc_core.inference.events import LaneEvent, LaneFinished, LaneStarted, ModelsLoaded, ShardDone
from virnuc_core.inference.launcher import assign_shards, run_lane
from virnuc_core.inference.plan import Shard
from virnuc_core.inference.runner import LoadedModels
from virnuc_core.run_folder import RunFolder


def test_shards_are_assigned_by_cost(finished_run: MadeRun) -> None:
    costs = [1, 1, 1, 5, 1, 1]
    shards = tuple(Shard(index=i, begin=i, end=i + 1, cost=cost) for i, cost in enumerate(costs))
    plan = replace(finished_run.plan, shards=shards)
    assert assign_shards(plan, range(6), 2) == ((3,), (0, 1, 2, 4, 5))
    assert assign_shards(plan, (4, 1), 1) == ((1, 4),)
    assert assign_shards(plan, (4, 1), 5) == ((1,), (4,))
    assert assign_shards(plan, (), 3) == ()


@pytest.fixture
def run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> MadeRun:
    return plan_run(tmp_path / "run", contigs, made_models.config())


@pytest.mark.usefixtures("fast_lanes")
def test_a_lane_says_what_it_does(
    tmp_path: Path, contigs: Path, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config(token_budget=63))
    events: list[LaneEvent] = []

    def emit(event: LaneEvent) -> None:
        assert not isinstance(event, ShardDone) or run.folder.shard(event.shard).exists()
        events.append(event)

    with caplog.at_level(logging.INFO):
        report = run_lane(run.folder, (2, 0), "cpu", lane=4, on_event=emit)
    begin, load, *done, end = events
    assert tuple(done) == report.shards
    assert isinstance(begin, LaneStarted)
    assert isinstance(load, ModelsLoaded)
    assert isinstance(end, LaneFinished)
    assert {event.lane for event in events} == {4}
    assert (begin.host, begin.shards) == (socket.gethostname(), (2, 0))
    assert begin.pid != os.getpid()
    assert end.seconds > load.seconds > 0
    assert [shard.shard for shard in report.shards] == [2, 0]
    assert (report.lane, report.device, report.load_seconds) == (4, "cpu", load.seconds)
    assert "CPU" in report.device_name
    assert "lane 4: shard 3 of" in caplog.text
    assert "dnabert (dnabert_s): packing efficiency is" in caplog.text
    assert multiprocessing.active_children() == []


def test_a_lane_that_hangs_is_ended(run: MadeRun, set_env: Callable[..., None]) -> None:
    """As in a driver or a file system that does not answer; its process does not even take SIGTERM."""
    set_env(VIRNUC_LANE_TIMEOUT=1.5)

    def stop(event: LaneEvent) -> None:
        if isinstance(event, LaneStarted):
            os.kill(event.pid, signal.SIGSTOP)

    message = r"lane 0 on cpu hangs: no shard was finished for 2 s \(VIRNUC_LANE_TIMEOUT\), with 2 of 2 to do"
    with pytest.raises(DeviceLostError, match=message):
        run_lane(run.folder, (0, 1), "cpu", on_event=stop)
    assert multiprocessing.active_children() == []


def test_a_lane_hangs_after_a_multiple_of_what_its_shards_take(set_env: Callable[..., None]) -> None:
    assert launcher.lane_timeout([]) == launcher.lane_timeout([1.0, 90.0]) == 1800.0
    assert launcher.lane_timeout([1.0, 200.0]) == 4000.0
    set_env(VIRNUC_LANE_TIMEOUT=60)
    assert launcher.lane_timeout([200.0]) == 60.0


@pytest.mark.parametrize(("level", "has_traceback"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_an_unexpected_error_of_the_lane_is_named_here(
    run: MadeRun,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    level: int,
    has_traceback: bool,
) -> None:
    message = "lane 2 failed unexpectedly: IndexError: tuple index"
    with caplog.at_level(level, logger="virnuc_core"), pytest.raises(VirnucError, match=message) as caught:
        run_lane(run.folder, (len(run.plan.shards),), "cpu", lane=2)
    assert not caught.value.retryable
    assert ("Traceback (most recent call last)" in caplog.text) is has_traceback
    assert "Traceback" not in capfd.readouterr().err
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: unspecified launch failure",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
def test_what_is_on_a_gpu_that_failed_is_never_freed(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """Freeing it would abort the process."""
    on_device = []

    def fail(*arguments: object) -> None:
        tensor = torch.zeros(1)
        on_device.append(weakref.ref(tensor))
        raise RuntimeError(message)

    monkeypatch.setattr(launcher, "_lost_device", threading.Event())
    monkeypatch.setattr(worker, "run_shards", fail)
    models = LoadedModels("cpu")
    with contextlib.suppress(DeviceLostError):
        launcher.run_lane_here(RunFolder(Path("run")), (0,), models, lambda event: None)
    assert launcher.has_lost_device()
    gc.collect()
    assert on_device[0]() is not None


@pytest.mark.usefixtures("fast_lanes")
def test_an_error_of_the_listener_ends_the_lane(run: MadeRun) -> None:
    def stop(event: LaneEvent) -> None:
        raise KeyboardInterrupt

    threads_before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run_lane(run.folder, range(len(run.plan.shards)), "cpu", on_event=stop)
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= threads_before


def test_threads_and_gpus_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, set_env: Callable[..., None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_env(VIRNUC_THREADS=8)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    one_each = dict.fromkeys(names, "1")
    assert launcher._child_environment("cpu", 3) == dict.fromkeys(names, "2")
    assert launcher._child_environment("cuda:1", 16) == {**one_each, "CUDA_VISIBLE_DEVICES": "1"}
    set_env(CUDA_VISIBLE_DEVICES="4,6")
    assert launcher._child_environment("cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "6"
