"""The steps of a run: what is retried, with a flow and without one, and what ends the run at once."""

import errno
from pathlib import Path

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from tasks.stages import as_task
from tests.made_models import MadeRun, copy_of
from virnuc_core import pipeline, retries
from virnuc_core.errors import InputError, LaneError
from virnuc_core.pipeline import Steps


def is_tried_again(error: BaseException, tries: int = 1) -> bool:
    step = as_task("fail", lambda: None)
    assert step.retries == 12
    assert step.retry_condition_fn is not None
    run = TaskRun.model_construct(run_count=tries)
    return bool(step.retry_condition_fn(step, run, Failed(data=error)))


def test_only_what_may_go_away_is_tried_again() -> None:
    assert is_tried_again(LaneError("the process died"))
    assert not is_tried_again(LaneError("the process died"), tries=4)
    assert not is_tried_again(InputError("no such file"))


def test_what_killed_lanes_left_is_removed(finished_run: MadeRun, tmp_path: Path) -> None:
    whole = copy_of(finished_run, tmp_path / "whole")
    left = [whole.folder.shards / f".{whole.folder.shard(i).name}.0123456789abcdef.tmp" for i in range(3)]
    for path in left:
        path.touch()
    pipeline.validate(whole.folder)
    assert not any(path.exists() for path in left)


def test_without_a_flow_a_step_is_tried_again_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def read() -> str:
        tries.append(len(tries) + 1)
        if len(tries) < 3:
            raise OSError(errno.ESTALE, "Stale file handle", "shards")
        return "listed"

    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0, 0.0))
    steps = Steps()
    assert steps(read) == "listed"
    assert list(steps.seconds) == ["read"]
