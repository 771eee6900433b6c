"""The steps of a run as Prefect tasks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from virnuc_core.pipeline import Steps
from virnuc_core.retries import DELAYS_SECONDS, is_repeated, translate_os_errors

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

P = ParamSpec("P")
R = TypeVar("R")


class FlowSteps(Steps):
    """Steps that are Prefect tasks, retried in the same way as others."""

    def call(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a step as a task without parameters, since Prefect would walk through all that a plan or a table holds."""
        return as_task(step.__name__, partial(step, *args, **kwargs))()


def as_task(name: str, call: Callable[[], R]) -> "Task[[], R]":
    """A task that finds finished work on disk: nothing is cached or persisted, and a retry calls it again."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    @task(
        name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(DELAYS_SECONDS),
        retry_delay_seconds=list(DELAYS_SECONDS),
        retry_condition_fn=retry_if_transient,
    )
    def step() -> R:
        with translate_os_errors():
            return call()

    return step


def retry_if_transient(task: "Task[..., Any]", run: "TaskRun", state: "State[Any]") -> bool:
    """Whether a failed task is retried; says so."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_repeated(task.name, error, run.run_count)
