"""The stages of a run: in a flow as Prefect tasks, else as calls with the same retries."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial, update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

from tasks.artifacts import in_flow
from virnuc_core import pipeline
from virnuc_core.retries import DELAYS_SECONDS, is_repeated, retrying, translate_os_errors

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

P = ParamSpec("P")
R = TypeVar("R")


class Resumable(Generic[P, R]):
    """A function that finds finished work on disk: in a flow a Prefect task, else a call that is retried in the same way.

    Nothing is cached or persisted: a retry calls it again, and it resumes. Only transient errors are retried, those of
    storage for 10 minutes. OSError becomes `StorageError`.
    """

    def __init__(self, function: Callable[P, R], name: str | None = None) -> None:
        update_wrapper(self, function)
        self._function = function
        self._name = name or function.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls it, until it succeeds or fails for good."""
        if in_flow():
            return self.task(*args, **kwargs)
        return retrying(self._name, partial(self.fn, *args, **kwargs))

    def fn(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls it once."""
        with translate_os_errors():
            return self._function(*args, **kwargs)

    @cached_property
    def task(self) -> "Task[P, R]":
        """The Prefect task."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        make_task = task(
            name=self._name,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(DELAYS_SECONDS),
            retry_delay_seconds=list(DELAYS_SECONDS),
            retry_condition_fn=retry_if_transient,
        )

        @wraps(self._function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return self.fn(*args, **kwargs)

        return make_task(call)


def retry_if_transient(task: "Task[..., Any]", run: "TaskRun", state: "State[Any]") -> bool:
    """Whether a failed task is retried; says so."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_repeated(task.name, error, run.run_count)


# Without planning and computing, of which the lanes do each part.
_RESUMABLE: Final[dict[pipeline.Stage, pipeline.Stage]] = {
    stage: Resumable(stage)
    for stage in (
        *(pipeline.label, pipeline.index, pipeline.divide, pipeline.validate, pipeline.aggregate),
        *(pipeline.classify, pipeline.fit),
        *(pipeline.fetch, pipeline.claim, pipeline.deliver),
    )
}


def resumable(stages: Sequence[pipeline.Stage]) -> list[pipeline.Stage]:
    """Replaces stages by those that are retried."""
    return [_RESUMABLE.get(stage, stage) for stage in stages]
