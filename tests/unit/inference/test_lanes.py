"""Lanes of this machine: in processes and here, their events, how they end, and models that stay loaded between runs."""

import contextlib
import errno
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.forked_lanes import kill_lanes
from tests.made_models import ESM2, MadeModels, MadeRun, make_esm2, plan_run, record_loads
from virnuc_core import Embedder, Predictor, embed, predict, retries
from virnuc_core.errors import (
    DeviceLostError,
    LaneError,
    MismatchError,
    StorageError,
    UsageError,
    VirnucError,
)
from virnuc_core.inference import lane_process, lanes, planning, runner
from virnuc_core.inference.events import LaneEvent, LaneFinished, LaneStarted, ModelsLoaded, ShardDone
from virnuc_core.inference.lane_process import LaneProcess
from virnuc_core.inference.lanes import LocalLanes, assign_shards
from virnuc_core.inference.plan import Shard
from virnuc_core.inference.shard import missing_shards, pending_shards
from virnuc_core.models.checkpoint import Checkpoint
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import Family

MODEL = f"esm2:{ESM2}"
PROTEINS = ["MKVLAAGIVGLCAKAYAE", "mkv", "MSTNPKPQRKTKRNTNRRPQDVKFPGG", "MKV", "MXBZUO*-."]
OTHERS = ["MSTNPKPQRKTKRNTNRR" * 20, "MK", "LAGVSERT" * 9]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    threads, num_threads = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= threads
    assert torch.get_num_threads() == num_threads
    assert not lanes._busy


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

    with caplog.at_level(logging.INFO), LaneProcess("cpu") as lane:
        lane.run(run.folder, (2, 0), 4, emit)
    begin, load, *done, end = events
    assert isinstance(begin, LaneStarted)
    assert isinstance(load, ModelsLoaded)
    assert isinstance(end, LaneFinished)
    assert {event.lane for event in events} == {4}
    assert (begin.host, begin.shards) == (socket.gethostname(), (2, 0))
    assert begin.pid != os.getpid()
    assert begin.rows == sum(shard.rows for shard in done if isinstance(shard, ShardDone))
    assert end.time > load.time > begin.time
    assert [shard.shard for shard in done if isinstance(shard, ShardDone)] == [2, 0]
    assert "CPU" in load.device_name
    assert "dnabert (dnabert_s): packing efficiency is" in caplog.text
    assert not lane.is_alive


def test_a_process_imports_torch_before_it_is_asked_and_ends_with_the_run(finished_run: MadeRun) -> None:
    before = _children()
    lanes = LocalLanes(("cpu",), in_processes=True)
    [started] = _children() - before
    deadline = time.monotonic() + 60
    while "libtorch_cpu" not in Path(f"/proc/{started}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert lanes.compute(finished_run.folder) == []
    assert _children() == before


def test_processes_of_gpus_that_were_started_early_are_taken_or_ended(
    set_env: Callable[..., None],
) -> None:
    before = _children()
    set_env(CUDA_VISIBLE_DEVICES="4,7,5")
    lane_process.start_early(("1", "2", "9"))
    started = _children() - before
    assert len(started) == 2
    with LocalLanes(("cuda:1",), in_processes=True):
        assert len(_children() & started) == 1
    lane_process.start_early(("auto",))
    assert len(_children() - before) == 3
    LocalLanes(("cpu",)).close()
    assert _children() == before


def _children() -> set[str]:
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_a_lane_that_hangs_is_ended(run: MadeRun, set_env: Callable[..., None]) -> None:
    """As in a driver or a file system that does not answer; its process does not even take SIGTERM."""
    set_env(VIRNUC_LANE_TIMEOUT=1.5)

    def stop(event: LaneEvent) -> None:
        if isinstance(event, LaneStarted):
            os.kill(event.pid, signal.SIGSTOP)

    message = r"lane 0 on cpu hung: no shard finished in 2 s \(VIRNUC_LANE_TIMEOUT\), 2 of 2 left"
    with LaneProcess("cpu") as lane, pytest.raises(DeviceLostError, match=message):
        lane.run(run.folder, (0, 1), 0, stop)
    assert not lane.is_alive


def test_a_lane_hangs_after_a_multiple_of_what_its_shards_take(set_env: Callable[..., None]) -> None:
    assert lane_process.lane_timeout([]) == lane_process.lane_timeout([1.0, 90.0]) == 1800.0
    assert lane_process.lane_timeout([1.0, 200.0]) == 4000.0
    set_env(VIRNUC_LANE_TIMEOUT=60)
    assert lane_process.lane_timeout([200.0]) == 60.0


@pytest.mark.parametrize(("level", "has_traceback"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_an_unexpected_error_of_the_lane_is_named_here(
    run: MadeRun,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    level: int,
    has_traceback: bool,
) -> None:
    message = "lane 2 failed unexpectedly: RuntimeError: Expected one of cpu"
    with (
        caplog.at_level(level, logger="virnuc_core"),
        LaneProcess("nowhere") as lane,
        pytest.raises(VirnucError, match=message) as caught,
    ):
        lane.run(run.folder, (0,), 2, lanes.ignore)
    assert not caught.value.retryable
    assert ("Traceback (most recent call last)" in caplog.text) is has_traceback
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: unspecified launch failure",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
def test_what_is_on_a_gpu_that_failed_is_never_freed(
    monkeypatch: pytest.MonkeyPatch, run: MadeRun, message: str
) -> None:
    """Freeing it would abort the process."""
    on_device = []

    def fail(*arguments: object) -> None:
        tensor = torch.zeros(1)
        on_device.append(weakref.ref(tensor))
        raise RuntimeError(message)

    monkeypatch.setattr(lanes, "_lost_device", threading.Event())
    monkeypatch.setattr(lanes, "run_shards", fail)
    with LocalLanes(("cpu",)) as here, contextlib.suppress(DeviceLostError):
        here._lane("cpu", threading.Event()).run(run.folder, (0,), 0, lanes.ignore)
    gc.collect()
    assert on_device[0]() is not None


@pytest.mark.usefixtures("fast_lanes")
def test_after_a_gpu_failed_here_its_lane_goes_on_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, run: MadeRun
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    events: list[LaneEvent] = []
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0,))
    monkeypatch.setattr(lanes, "_lost_device", threading.Event())
    monkeypatch.setattr(lanes, "run_shards", fail)
    LocalLanes(("cpu",), events.append).compute(run.folder)
    first, second = (event.pid for event in events if isinstance(event, LaneStarted))
    assert first == os.getpid() != second
    assert pending_shards(run.folder, run.plan) == ()


@pytest.mark.usefixtures("fast_lanes")
def test_an_interrupt_ends_lanes_that_compute_and_those_that_wait_to_be_tried_again(run: MadeRun) -> None:
    """One lane is killed and waits; the process of the other does not go on without this one."""
    pids: list[int] = []
    done = 0

    def stop(event: LaneEvent) -> None:
        nonlocal done
        if isinstance(event, LaneStarted):
            pids.append(event.pid)
            if len(pids) > 2:
                return
            if event.lane == 0:
                os.kill(event.pid, signal.SIGKILL)
            else:
                os.kill(event.pid, signal.SIGSTOP)
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        done += isinstance(event, ShardDone)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalLanes(("cpu:0", "cpu:1"), stop).compute(run.folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 15
    assert len(pids) == 2, "a lane was started again"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert done == 0


def shard_bytes(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.shards.glob("shard_*.h5"))}


def test_neither_more_lanes_nor_a_killed_one_change_a_byte(
    tmp_path: Path, contigs: Path, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, killed = (
        plan_run(tmp_path / name, contigs, made_models.config(), shard_seconds=0.02)
        for name in ("one", "two", "killed")
    )
    every = tuple(range(len(one.plan.shards)))
    assert len(every) >= 4
    one.compute()
    kill_lanes(monkeypatch, "cpu", num_shards=1, times=1)
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0,) * 3)
    reports = LocalLanes(("cpu:0", "cpu:1")).compute(two.folder)
    assert [(report.lane, report.device) for report in reports] == [(0, "cpu:0"), (1, "cpu:1")]
    assert all(report.shards for report in reports)
    assert shard_bytes(two.folder) == shard_bytes(one.folder)

    events: list[LaneEvent] = []
    [report] = LocalLanes(("cpu",), events.append, in_processes=True).compute(killed.folder)
    starts = [event.shards for event in events if isinstance(event, LaneStarted)]
    assert starts == [every, every[1:]]
    # A shard that was written but not yet told of when the process was killed is in no report.
    assert set(every[1:]) <= {shard.shard for shard in report.shards}
    assert shard_bytes(killed.folder) == shard_bytes(one.folder)


def test_a_lane_that_always_dies_does_not_stop_the_others(
    run: MadeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = range(len(run.plan.shards))
    _, lost = assign_shards(run.plan, every, 2)
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0,) * 3)
    kill_lanes(monkeypatch, "cpu:1", num_shards=0, times=99)
    with pytest.raises(LaneError, match=rf"lane 1 on cpu:1 was ended by SIGKILL .* with {len(lost)} of"):
        LocalLanes(("cpu:0", "cpu:1")).compute(run.folder)
    assert pending_shards(run.folder, run.plan) == lost
    assert f"1 of 2 lanes failed, and {len(lost)} of {len(every)} shards are missing" in caplog.text
    assert caplog.text.count("retrying lane 1 on cpu:1 in 0 s: ") == 3


@pytest.mark.usefixtures("fast_lanes")
def test_a_process_is_kept_and_one_that_has_died_is_replaced(
    run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when this process has gone to another folder."""
    pids: list[int] = []

    def observe(event: LaneEvent) -> None:
        if isinstance(event, LaneStarted):
            pids.append(event.pid)

    monkeypatch.chdir(tmp_path)
    with LocalLanes(("cpu",), observe, keep=True, in_processes=True) as kept:
        kept.compute_lane(RunFolder(Path("run")), (0,), 0, "cpu")
        monkeypatch.chdir(run.folder.root)
        kept.compute_lane(RunFolder(Path()), (1,), 0, "cpu")
        os.kill(pids[0], signal.SIGKILL)
        while kept._lanes["cpu"].is_alive:  # type: ignore[union-attr]
            time.sleep(0.01)
        kept.compute_lane(run.folder, (2,), 0, "cpu")
    assert pids[0] == pids[1] != pids[2]
    assert missing_shards(run.folder, (0, 1, 2)) == ()


_UNGUARDED = """
import sys
import virnuc_core.inference.lane_process
assert "torch" not in sys.modules
from pathlib import Path
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.run_folder import RunFolder
print(len(LocalLanes(("cpu:0", "cpu:1")).compute(RunFolder(Path(sys.argv[1])))))
"""


def test_a_script_needs_no_guard_around_its_main_part(run: MadeRun, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_UNGUARDED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, script, run.folder.root]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def test_threads_and_gpus_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, set_env: Callable[..., None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_env(VIRNUC_THREADS=8)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    one_each = dict.fromkeys(names, "1")
    assert lane_process._variables("cpu", 3) == dict.fromkeys(names, "2")
    assert lane_process._variables("cuda:1", 16) == {**one_each, "CUDA_VISIBLE_DEVICES": "1"}
    set_env(CUDA_VISIBLE_DEVICES="4,6")
    assert lane_process._variables("cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_loads(monkeypatch)


def test_every_call_gives_the_bits_of_a_process_of_its_own(loads: list[str]) -> None:
    expected = embed(PROTEINS, MODEL, devices="cpu")
    loads.clear()
    with Embedder(MODEL, devices="cpu") as model:
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)
        model.embed(OTHERS)
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)
        assert model.embed([]).shape == (0, 96)
    assert len(loads) == 1


def test_a_call_takes_no_setting_of_torch_from_its_thread() -> None:
    expected = embed(PROTEINS, MODEL, devices="cpu")
    with Embedder(MODEL, devices="cpu") as model, torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)


def test_a_predictor_writes_what_predict_writes(
    made_models: MadeModels, contigs: Path, tmp_path: Path, loads: list[str]
) -> None:
    names = {"esm_model": made_models.esm2, "dnabert_model": made_models.dnabert, "head": made_models.head}
    settings = {"chunk_length": 60, "devices": "cpu", **{name: str(path) for name, path in names.items()}}
    expected = predict(contigs, **settings)  # type: ignore[arg-type]
    loads.clear()
    with Predictor(**settings) as model:  # type: ignore[arg-type]
        model.predict([("a", "ATGGCC" * 30)])
        found = model.predict(contigs, out=tmp_path / "run")
        assert found.chunks.equals(expected.chunks)
        assert found.contigs.equals(expected.contigs)
        assert found.folder == tmp_path / "run"
        with pytest.raises(MismatchError, match="contains a run with different settings"):
            model.predict([("a", "ATGGCC" * 30)], out=tmp_path / "run")
    assert len(loads) == 2


def test_threads_share_a_model(loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    computing = 0
    run_shards = lanes.run_shards

    def watch(*arguments: object) -> None:
        nonlocal computing
        computing += 1
        at_once.append(computing)
        run_shards(*arguments)  # type: ignore[arg-type]
        computing -= 1

    monkeypatch.setattr(lanes, "run_shards", watch)
    parts = [[*PROTEINS[number:], *OTHERS[: number % 3]] for number in range(4)] * 3
    expected = [embed(part, MODEL, devices="cpu") for part in parts]
    loads.clear()
    with (
        Embedder(MODEL, devices="cpu") as model,
        Embedder(MODEL, devices="cpu") as another,
        ThreadPoolExecutor(6) as threads,
    ):
        found = [
            threads.submit((model, another)[number % 2].embed, part) for number, part in enumerate(parts)
        ]
        for vectors, future in zip(expected, found, strict=True):
            np.testing.assert_array_equal(future.result(), vectors)
    assert len(loads) == 2
    assert set(at_once) == {1}  # the CPU is one device, whoever uses it


def test_only_what_is_missing_is_computed(run: MadeRun, finished_run: MadeRun) -> None:
    run.compute([1])
    made_at = run.folder.shard(1).stat().st_mtime_ns
    left = run.folder.shards / f".{run.folder.shard(0).name}.0123456789abcdef.tmp"
    left.touch()
    with LocalLanes(("cpu",)) as here:
        [report] = here.compute(run.folder)
        assert here.compute(run.folder) == []
    assert not left.exists(), "what a killed lane left"
    assert run.folder.shard(1).stat().st_mtime_ns == made_at
    indices = [shard.index for shard in run.plan.shards]
    assert [done.shard for done in report.shards] == [0, *indices[2:]]
    assert shard_bytes(run.folder) == shard_bytes(finished_run.folder)
    assert not run.folder.lanes.exists(), "a journal is for lanes in a pool"


def test_closing_waits_for_calls_and_ends_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Embedder(MODEL, devices="cpu")
    expected = model.embed(PROTEINS)
    begun, run_shards = threading.Event(), lanes.run_shards

    def run_slowly(*arguments: object) -> None:
        begun.set()
        time.sleep(0.3)
        run_shards(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(lanes, "run_shards", run_slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(model.embed, PROTEINS)
        assert begun.wait(10)
        second = threads.submit(model.embed, PROTEINS)
        time.sleep(0.1)
        model.close()
        np.testing.assert_array_equal(first.result(), expected)
        with pytest.raises(UsageError, match="are closed"):
            second.result()
    model.close()
    with pytest.raises(UsageError, match="are closed"):
        model.embed(PROTEINS)


def test_a_model_whose_file_has_changed_is_loaded_anew(tmp_path: Path, loads: list[str]) -> None:
    path = make_esm2(tmp_path / "esm2")
    with Embedder(str(path), devices="cpu") as model:
        first = model.embed(PROTEINS)
        shutil.rmtree(path)
        make_esm2(path, seed=7)
        second = model.embed(PROTEINS)
        assert len(loads) == 2
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(second, embed(PROTEINS, str(path), devices="cpu"))


def test_after_an_error_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    with Embedder(MODEL, devices="cpu") as model:
        expected = model.embed(PROTEINS)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "write_shard", fail)
            with pytest.raises(StorageError, match="No space left"):
                model.embed(PROTEINS)
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)


def test_an_interrupt_ends_the_call_and_leaves_the_model(loads: list[str], run: MadeRun) -> None:
    written = 0

    def interrupt(event: LaneEvent) -> None:
        nonlocal written
        if isinstance(event, ShardDone):
            written += 1
            if written == 1:
                signal.pthread_kill(threading.main_thread().ident or os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LocalLanes(("cpu",), interrupt, keep=True) as kept:
            with pytest.raises(KeyboardInterrupt):
                kept.compute(run.folder)
            assert 0 < written < len(run.plan.shards)
            kept.compute(run.folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(loads) == 2  # one of each family
    assert pending_shards(run.folder, run.plan) == ()


def test_memory_that_its_own_models_take_changes_no_plan(
    tmp_path: Path, contigs: Path, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = iter([3000, 2000, 1000, 500])
    monkeypatch.setattr(planning, "default_token_budget", lambda *_: next(budgets))
    models, config = LocalLanes(("cpu",)), made_models.config()
    plans = []
    for number in range(2):
        run = plan_run(tmp_path / f"run{number}", contigs, made_models.config(token_budget=63))
        run.folder.plan.unlink()
        plans.append(models.plan(run.folder, config, "predict"))
    assert plans[0] == plans[1]
    assert [model.token_budget for model in plans[0].models] == [3000, 2000]


def test_a_model_of_the_hub_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for = []

    def open_once(name: str, family: Family) -> Checkpoint:
        looked_for.append(name)
        return open_checkpoint(str(ESM2) if name == "owner/name" else name, family)

    monkeypatch.setattr(planning, "open_checkpoint", open_once)
    with Embedder("esm2:owner/name", devices="cpu") as model:
        for _ in range(2):
            model.embed(PROTEINS)
    assert looked_for == ["owner/name", str(ESM2)]


_FORKED = """
import os, sys
from virnuc_core import Embedder
from virnuc_core.errors import UsageError
model = Embedder(sys.argv[1], devices="cpu")
if os.fork() == 0:
    try:
        model.embed(["MKV"])
    except UsageError as error:
        print(error, flush=True)
    model.close()
    os._exit(0)
os.wait()
print(model.embed(["MKV"]).shape[0])
"""


def test_models_of_another_process_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED, MODEL], capture_output=True, text=True, check=True)
    refused, own = done.stdout.splitlines()
    assert "load them where they are used" in refused
    assert own == "1", "and stay usable where they were made"
