"""The steps of a run as Prefect tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from virnuc_core.pipeline import Steps
from virnuc_core.retries import DELAYS_SECONDS, is_repeated, translate_os_errors

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSteps(Steps):
    """Steps that are Prefect tasks, each after the one before; a repeated step is a retried task.

    Nothing is cached or persisted: a retry calls the step again, which finds finished work on disk.
    """

    states: "list[State[Any]]" = field(default_factory=list)

    def call(self, name: str, work: Callable[[], R], *, repeats: bool) -> R:
        state = as_task(name, work, repeats=repeats)(return_state=True, wait_for=self.states[-1:])
        self.states.append(state)
        return state.result()


def as_task(name: str, call: Callable[[], R], *, repeats: bool = True) -> "Task[[], R]":
    """A task without parameters, since Prefect would walk through all that a plan or a table holds."""

    @retried_task(name, DELAYS_SECONDS if repeats else (), retry_if_transient)
    def step() -> R:
        with translate_os_errors():
            return call()

    return step


def retried_task(
    name: str, delays: Sequence[float], is_retried: Callable[..., Any]
) -> "Callable[[Callable[P, R]], Task[P, R]]":
    """Makes a function a task that is neither cached nor persisted, and retried after `delays` in seconds."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    return task(
        name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(delays),
        retry_delay_seconds=list(delays),
        retry_condition_fn=is_retried,
    )


def retry_if_transient(task: "Task[..., Any]", run: "TaskRun", state: "State[Any]") -> bool:
    """Whether a failed task is retried; says so."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_repeated(task.name, error, run.run_count)
