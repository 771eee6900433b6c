"""What every stage of a run is to Prefect."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from virnuc_core.errors import is_retryable, storage_error

P = ParamSpec("P")
R = TypeVar("R")

RETRY_DELAYS_SECONDS: Final = [2.0, 10.0, 60.0]

# Set while this process is being stopped: nothing is tried again then.
stopping: Final = threading.Event()


def stage(function: Callable[P, R]) -> Task[P, R]:
    """Makes a task of a function that finds on the disk what is already done.

    So nothing is cached or persisted: a retry calls it again, and it goes on where it stopped. It is called
    again by itself only after an error that this can help with. Errors of the operating system become
    `StorageError`.
    """

    @wraps(function)
    def in_own_words(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise storage_error(error) from error

    make_task = task(
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_DELAYS_SECONDS),
        retry_delay_seconds=RETRY_DELAYS_SECONDS,
        retry_condition_fn=_can_help,
    )
    return make_task(in_own_words)


def _can_help(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not stopping.is_set() and isinstance(error, BaseException) and is_retryable(error)
