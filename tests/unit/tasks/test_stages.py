"""Stages of flows: what is retried, and what ends the run at once."""

import errno
import os
import threading
from pathlib import Path

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from tasks import stages
from tasks.stages import Resumable, find_pending
from tests.made_models import MadeModels, MadeRun, copy_of, plan_run
from virnuc_core import pipeline, retries
from virnuc_core.errors import InputError, LaneError
from virnuc_core.inference import launcher, worker
from virnuc_core.inference.events import LaneStarted
from virnuc_core.inference.lane_journal import JournalTail, LaneJournal
from virnuc_core.inference.resident import ResidentModels
from virnuc_core.inference.shard import missing_shards
from virnuc_core.pipeline import Run
from virnuc_core.settings import RunConfig


@Resumable
def fail(error: BaseException) -> None:
    raise error


def is_tried_again(error: BaseException, tries: int = 1) -> bool:
    assert fail.task.retry_condition_fn is not None
    run = TaskRun.model_construct(run_count=tries)
    return bool(fail.task.retry_condition_fn(fail.task, run, Failed(data=error)))


def test_only_what_may_go_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_tried_again(LaneError("the process died"))
    assert not is_tried_again(LaneError("the process died"), tries=4)
    assert not is_tried_again(InputError("no such file"))
    monkeypatch.setattr(stages, "stopping", stages.threading.Event())
    stages.stopping.set()
    assert not is_tried_again(LaneError("the process died"))


def test_what_killed_lanes_left_is_removed(finished_run: MadeRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    paths = [run.folder.shard(index) for index in range(3)]
    left = [path.with_name(f".{path.name}.0123456789abcdef.tmp") for path in paths]
    for path in left:
        path.touch()
    paths[1].unlink()
    paths[2].unlink()
    assert find_pending.fn(run.folder, {2}) == (1,)
    assert [path.exists() for path in left] == [True, False, True]  # another lane may be writing the last

    whole = copy_of(finished_run, tmp_path / "whole")
    left = [whole.folder.shards / path.name for path in left]
    for path in left:
        path.touch()
    finished = Run(whole.folder, RunConfig(), "predict", lanes=ResidentModels(("cpu",)))
    finished.plan = whole.plan
    pipeline.validate(finished)
    assert not any(path.exists() for path in left)


def test_a_stage_is_tried_again_without_a_flow_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    @Resumable
    def read() -> str:
        tries.append(len(tries) + 1)
        if len(tries) < 3:
            raise OSError(errno.ESTALE, "Stale file handle", "shards")
        return "listed"

    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0, 0.0))
    stages.stopping.clear()
    assert read() == "listed"
    assert read.task.retries == 12


@pytest.mark.usefixtures("fast_lanes")
def test_after_a_gpu_failed_here_its_lane_goes_on_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, made_models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    run = plan_run(tmp_path / "run", contigs, made_models.config())
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0,))
    monkeypatch.setattr(launcher, "_lost_device", threading.Event())
    monkeypatch.setattr(worker, "run_shards", fail)
    stages.stopping.clear()
    assert stages.computes_here(1)
    with LaneJournal(run.folder.root / "lane.jsonl") as journal:
        stages.compute_shards(run.folder, (0,), "cpu", 0, 1, journal)
    assert not stages.computes_here(1)
    entries = JournalTail(run.folder.root / "lane.jsonl").read_new()
    first, second = (entry.event.pid for entry in entries if isinstance(entry.event, LaneStarted))
    assert first == os.getpid() != second
    assert missing_shards(run.folder, (0, 1)) == (1,)
