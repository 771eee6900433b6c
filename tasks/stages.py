"""The steps of a run as Prefect tasks."""

from collections.abc import Callable
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

    @step_task(name, repeats=repeats)
    def step() -> R:
        with translate_os_errors():
            return call()

    return step


def step_task(name: str, *, repeats: bool = True) -> "Callable[[Callable[P, R]], Task[P, R]]":
    """Makes a function a task that is neither cached nor persisted, and repeated after transient errors."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    return task(
        name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(DELAYS_SECONDS) if repeats else 0,
        retry_delay_seconds=list(DELAYS_SECONDS) if repeats else None,
        retry_condition_fn=_retry_if_transient,
    )


def _retry_if_transient(task: "Task[..., Any]", run: "TaskRun", state: "State[Any]") -> bool:
    return isinstance(state.data, BaseException) and is_repeated(task.name, state.data, run.run_count)
