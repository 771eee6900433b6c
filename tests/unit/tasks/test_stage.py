"""Stages of flows: what is tried again, and what ends the run at once."""

import errno

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from tasks import stage as stages
from tasks.stage import stage
from virnuc_core.errors import InputError, LaneError, StorageError, StorageLostError


@stage
def fail(error: BaseException) -> None:
    raise error


def is_tried_again(error: BaseException) -> bool:
    assert fail.retry_condition_fn is not None
    return bool(fail.retry_condition_fn(fail, TaskRun.model_construct(), Failed(data=error)))


def test_only_what_may_go_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_tried_again(LaneError("the process died"))
    assert not is_tried_again(InputError("no such file"))
    monkeypatch.setattr(stages, "stopping", stages.threading.Event())
    stages.stopping.set()
    assert not is_tried_again(LaneError("the process died"))


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageLostError), (errno.ENOSPC, StorageError)])
def test_an_error_of_the_disk_is_told_in_own_words(number: int, kind: type[StorageError]) -> None:
    with pytest.raises(StorageError) as caught:
        fail.fn(OSError(number, "it failed", "table.tsv"))
    assert type(caught.value) is kind
