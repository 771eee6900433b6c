"""The stages of a run as Prefect tasks."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from tasks.artifacts import ProgressArtifact
from virnuc_core import pipeline
from virnuc_core.errors import StorageLostError, is_retryable
from virnuc_core.inference import launcher
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import missing_shards, pending_shards, remove_shard_temporaries
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

P = ParamSpec("P")
R = TypeVar("R")

# All of them for storage that is away, the first three for other errors that may go away.
RETRY_DELAYS_SECONDS: Final = [2.0, 10.0, *[60.0] * 10]
_MAX_RETRIES: Final = 3

_log = logging.getLogger(__name__)

# Set while this process is being stopped: no retries then.
stopping: Final = threading.Event()


def resumable_task(function: Callable[P, R]) -> Task[P, R]:
    """Makes a task of a function that finds finished work on disk.

    Nothing is cached or persisted: a retry calls it again, and it resumes. Only transient errors are retried, those of
    storage for 10 minutes. OSError becomes `StorageError`.
    """

    @wraps(function)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        with pipeline.translate_os_errors():
            return function(*args, **kwargs)

    make_task = task(
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_DELAYS_SECONDS),
        retry_delay_seconds=RETRY_DELAYS_SECONDS,
        retry_condition_fn=retry_if_transient,
    )
    return make_task(translated)


def retry_if_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed task is retried; says so."""
    error, tries = state.result(raise_on_failure=False), run.run_count
    most = len(RETRY_DELAYS_SECONDS) if isinstance(error, StorageLostError) else _MAX_RETRIES
    if stopping.is_set() or not isinstance(error, BaseException) or not is_retryable(error) or tries > most:
        return False
    _log.warning("%s is tried again in %.0f s: %s", task.name, RETRY_DELAYS_SECONDS[tries - 1], error)
    return True


def awaiting_storage(read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function of the run's files, again for 10 minutes while the storage is away; it is no task.

    Raises:
        StorageError: the file cannot be read.
    """
    delays = iter(RETRY_DELAYS_SECONDS)
    while True:
        try:
            with pipeline.translate_os_errors():
                return read(*args, **kwargs)
        except StorageLostError as error:
            if (delay := next(delays, None)) is None:
                raise
            _log.warning("waiting %.0f s for the run's folder: %s", delay, error)
            time.sleep(delay)


# Without planning and computing, which are tasks and runs of the lanes.
_TASKS: Final[dict[pipeline.Stage, pipeline.Stage]] = {
    stage: resumable_task(stage)
    for stage in (
        *(pipeline.label, pipeline.index, pipeline.divide, pipeline.validate, pipeline.aggregate),
        *(pipeline.classify, pipeline.fit, pipeline.replace),
        *(pipeline.fetch, pipeline.claim, pipeline.deliver),
    )
}


def as_tasks(stages: Sequence[pipeline.Stage]) -> list[pipeline.Stage]:
    """Replaces stages by Prefect tasks where there is one."""
    return [_TASKS.get(stage, stage) for stage in stages]


@resumable_task
def plan(
    folder: RunFolder, config: RunConfig, kind: Kind, devices: tuple[str, ...], token: str | None = None
) -> RunPlan:
    """Writes the plan, or checks that the one in the folder is of the same run; `token` as for `open_plan`."""
    return open_plan(config, FrameStore.open(folder.frames), kind, devices, folder, token)


@resumable_task
def find_pending(folder: RunFolder, taken: Collection[int] = ()) -> tuple[int, ...]:
    """Returns the shards that are missing or damaged; quarantines the damaged ones.

    Shards in `taken` are being computed and left out; temporary files of other, killed lanes are removed.
    """
    stopping.clear()
    pending = tuple(shard for shard in pending_shards(folder, read_plan(folder.plan)) if shard not in taken)
    remove_shard_temporaries(folder, pending)
    return pending


@resumable_task
def compute_shards(
    folder: RunFolder, shards: tuple[int, ...], device: str, lane: int, num_lanes: int, journal: LaneJournal
) -> None:
    """Computes shards in a separate process, whose errors it raises; called again, it skips finished ones."""
    left = missing_shards(folder, shards)
    if not left:
        return
    planned = read_plan(folder.plan).shards
    rows = {shard: planned[shard].end - planned[shard].begin for shard in shards}
    total = sum(rows.values())
    done = total - sum(rows[shard] for shard in left)
    bar = ProgressArtifact(f"virnuc-lane-{lane}", f"Lane {lane} on {socket.gethostname()} {device}")

    def emit(event: LaneEvent) -> None:
        nonlocal done
        journal.write(event)
        if isinstance(event, ShardDone):
            done += rows[event.shard]
            bar.update(100 * done / total)

    launcher.run_lane(folder, left, device, lane=lane, num_lanes=num_lanes, on_event=emit)


def end_lane_processes() -> None:
    """Stops every lane of this process, without retries."""
    stopping.set()
    launcher.end_lane_processes()
