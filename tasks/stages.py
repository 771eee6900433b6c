"""The stages of a run: in a flow as Prefect tasks, else as calls with the same retries."""

import socket
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial, update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

from tasks.artifacts import ProgressArtifact, in_flow
from virnuc_core import pipeline
from virnuc_core.inference import launcher
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import missing_shards, pending_shards, remove_shard_temporaries
from virnuc_core.retries import DELAYS_SECONDS, is_repeated, retrying, translate_os_errors
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

P = ParamSpec("P")
R = TypeVar("R")

# Set while this process is being stopped: no retries then.
stopping: Final = threading.Event()


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
        return retrying(self._name, partial(self.fn, *args, **kwargs), stopping)

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
    return (
        isinstance(error, BaseException)
        and not stopping.is_set()
        and is_repeated(task.name, error, run.run_count)
    )


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


@Resumable
def plan(
    folder: RunFolder, config: RunConfig, kind: Kind, devices: tuple[str, ...], token: str | None = None
) -> RunPlan:
    """Writes the plan, or checks that the one in the folder is of the same run; `token` as for `open_plan`."""
    return open_plan(config, FrameStore.open(folder.frames), kind, devices, folder, token)


@Resumable
def find_pending(folder: RunFolder, taken: Collection[int] = ()) -> tuple[int, ...]:
    """Returns the shards that are missing or damaged; quarantines the damaged ones.

    Shards in `taken` are being computed and left out; temporary files of other, killed lanes are removed.
    """
    stopping.clear()
    pending = tuple(shard for shard in pending_shards(folder, read_plan(folder.plan)) if shard not in taken)
    remove_shard_temporaries(folder, pending)
    return pending


@Resumable
def compute_shards(
    folder: RunFolder, shards: tuple[int, ...], device: str, lane: int, num_lanes: int, journal: LaneJournal
) -> None:
    """Computes shards on a device, and raises the lane's errors; called again, it skips finished ones.

    In a process of its own, unless `computes_here`.
    """
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

    if computes_here(num_lanes):
        from virnuc_core.inference.runner import LoadedModels  # slow imports

        models = LoadedModels(device)
        launcher.run_lane_here(folder, left, models, emit)
        models.close()
    else:
        launcher.run_lane(folder, left, device, lane=lane, num_lanes=num_lanes, on_event=emit)


def computes_here(num_lanes: int) -> bool:
    """Whether a lane is computed in this process: the only one of a run without a flow, until a GPU fails here."""
    return num_lanes == 1 and not in_flow() and not launcher.has_lost_device()


def end_lane_processes() -> None:
    """Stops every lane of this process, without retries."""
    stopping.set()
    launcher.end_lane_processes()
