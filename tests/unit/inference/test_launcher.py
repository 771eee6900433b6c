"""Lanes: real processes, their events, their log, and how they end."""

import logging
import multiprocessing
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.made_models import MadeModels, MadeRun, make_models, plan_run, write_contigs
from virnuc_core.env_config import reload
from virnuc_core.errors import CheckpointError, UsageError, VirnucError
from virnuc_core.inference import launcher
from virnuc_core.inference.events import LaneEvent, LaneFinished, LaneStarted, ModelsLoaded, ShardDone
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.launcher import assign_shards, compute_missing, require_main_process, run_lane
from virnuc_core.inference.plan import Shard


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


def test_a_lane_computes_what_this_process_would(
    run: MadeRun, finished_run: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[LaneEvent] = []
    with caplog.at_level(logging.INFO):
        report = run_lane(run.folder, (0, 2), "cpu", lane=4, on_event=events.append)
    kinds = [LaneStarted, ModelsLoaded, ShardDone, ShardDone, LaneFinished]
    assert [type(event) for event in events] == kinds
    assert tuple(events[2:4]) == report.shards
    begin, end = events[0], events[-1]
    assert isinstance(begin, LaneStarted)
    assert isinstance(end, LaneFinished)
    assert (begin.lane, begin.host, begin.shards) == (4, socket.gethostname(), (0, 2))
    assert begin.pid != os.getpid()
    assert end.seconds == pytest.approx(report.seconds, abs=0.5)
    assert [done.shard for done in report.shards] == [0, 2]
    assert (report.lane, report.device) == (4, "cpu")
    assert "CPU" in report.device_name
    assert 0 < report.load_seconds < report.seconds
    for index in (0, 2):
        assert run.folder.shard(index).read_bytes() == finished_run.folder.shard(index).read_bytes()
    logged = [record for record in caplog.records if record.name == "virnuc_core.inference.worker"]
    assert logged[0].getMessage().startswith("lane 4: shard 1 of")
    assert multiprocessing.active_children() == []


def test_only_what_is_missing_is_computed(run: MadeRun) -> None:
    run.compute([1])
    threads = torch.get_num_threads()
    [report] = compute_missing(run.folder, run.plan, ("cpu",))
    assert torch.get_num_threads() == threads
    wanted = [shard.index for shard in run.plan.shards if shard.index != 1]
    assert sorted(done.shard for done in report.shards) == wanted
    assert report.load_seconds > 0
    [journal] = run.folder.lanes.iterdir()
    assert len(JournalTail(journal).read_new()) == len(wanted) + 3
    assert compute_missing(run.folder, run.plan, ("cpu",)) == []


def test_several_processes_give_the_same_bytes(run: MadeRun, finished_run: MadeRun) -> None:
    # Two names of the only device that exists everywhere.
    assert len(compute_missing(run.folder, run.plan, ("cpu", "cpu"))) == 2
    for shard in run.plan.shards:
        mine, theirs = (r.folder.shard(shard.index).read_bytes() for r in (run, finished_run))
        assert mine == theirs


def test_a_lane_makes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_main_process()
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"{launcher._LANE_PROCESS}-0")
    with pytest.raises(UsageError, match="__main__"):
        require_main_process()


def test_an_error_of_the_lane_is_raised_here(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    (models.dnabert / "tokenizer.json").unlink()
    (models.dnabert / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        run_lane(run.folder, (0,), "cpu")
    assert multiprocessing.active_children() == []


def test_an_unexpected_error_of_the_lane_is_named_here(
    run: MadeRun, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = len(run.plan.shards)
    for level, has_traceback in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.clear()
        with (
            caplog.at_level(level, logger="virnuc_core"),
            pytest.raises(VirnucError, match="lane 2 failed unexpectedly: IndexError: tuple index") as caught,
        ):
            run_lane(run.folder, (absent,), "cpu", lane=2)
        assert not caught.value.retryable
        assert ("Traceback (most recent call last)" in caplog.text) is has_traceback
    assert "Traceback" not in capfd.readouterr().err
    assert multiprocessing.active_children() == []


def test_an_error_of_the_listener_ends_the_lane(run: MadeRun) -> None:
    def stop(event: LaneEvent) -> None:
        raise KeyboardInterrupt

    threads_before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_lane(run.folder, range(len(run.plan.shards)), "cpu", on_event=stop)
    assert multiprocessing.active_children() == []
    assert threading.active_count() == threads_before


def test_threads_and_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_THREADS", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reload()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    assert launcher._child_environment("cpu", 3) == dict.fromkeys(names, "2")
    assert launcher._child_environment("cuda:1", 16) == {
        **dict.fromkeys(names, "1"),
        "CUDA_VISIBLE_DEVICES": "1",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    reload()
    assert launcher._child_environment("cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "6"
