"""What every stage of a run is to Prefect."""

import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from virnuc_core.errors import VirnucError

P = ParamSpec("P")
R = TypeVar("R")

RETRY_DELAYS_SECONDS: Final = [1.0, 10.0]

# Set while this process is being stopped: nothing is tried again then.
stopping: Final = threading.Event()


def stage(function: Callable[P, R]) -> Task[P, R]:
    """Makes a task of a function that finds on the disk what is already done.

    So nothing is cached or persisted: a retry calls it again, and it goes on where it stopped. It is called
    again at once only after an error that says that this can help.
    """
    make_task = task(
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_DELAYS_SECONDS),
        retry_delay_seconds=RETRY_DELAYS_SECONDS,
        retry_condition_fn=_can_help,
    )
    return make_task(function)


def _can_help(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not stopping.is_set() and isinstance(error, VirnucError) and error.retryable
