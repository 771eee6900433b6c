"""What all runs share, in a flow and without one: names, checks of paths, lanes, and the MLflow run.

Prefect is imported in a flow alone.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts import in_flow, is_deployed
from tasks.pages.markdown import size
from tasks.progress import FlowProgress, LaneRows, current_progress
from tasks.publishing import flow_links, run_tags
from tasks.run_entries import Entry, run_entry
from tasks.stages import FlowSteps
from tasks.tracking import end_runs, start_tracking, track
from virnuc_core.env_config import ignored_variables
from virnuc_core.errors import UsageError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.pipeline import Lanes, Steps
from virnuc_core.remote import file_name, is_url, output_path, require_shared_staging
from virnuc_core.settings import LaneMode, LaneSettings

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

_log = logging.getLogger(__name__)


def run_name() -> str:
    """Name of a flow run: command, sample, models and size, as in "predict contigs.fa and 2 more tiny 12.3 MB"."""
    from prefect.runtime import flow_run

    from virnuc_core.training.labels import LabelledFiles  # slow imports

    parameters: dict[str, Any] = flow_run.parameters
    files = parameters.get("files", ())
    if isinstance(files, dict):  # parameters of a deployment
        files = LabelledFiles(**files)
    inputs = files.paths if files else parameters["inputs"]
    models = parameters.get("model") or getattr(parameters["settings"], "preset", None)
    more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
    num_bytes = sum(os.path.getsize(path) for path in inputs if os.path.isfile(path))
    parts = (flow_run.flow_name, f"{file_name(inputs[0]) if inputs else ''}{more}", models, size(num_bytes))
    return " ".join(filter(None, parts))


def require_places(inputs: Iterable[str], out: str, mode: LaneMode) -> None:
    """Checks paths as `require_absolute`; for URLs in mode pool, UsageError unless VIRNUC_STAGING names a folder."""
    names = [*inputs, out]
    require_absolute(*itertools.filterfalse(is_url, names))
    if mode == "pool" and (urls := list(filter(is_url, names))):
        require_shared_staging(urls[0])


def require_absolute(*paths: str) -> None:
    """Raises UsageError for URLs, and for relative paths in a run of a deployment: it runs in its worker's folder."""
    if urls := list(filter(is_url, paths)):
        raise UsageError(f"{urls[0]} is a URL: give a path.")
    relative = [path for path in paths if not Path(path).is_absolute()]
    if relative and is_deployed():
        raise UsageError(
            f"{', '.join(relative)}: give absolute paths, since a deployed run has no working folder."
        )


def choose_lanes(where: LaneSettings, devices: tuple[str, ...]) -> Lanes:
    """Finds the devices or the pool for a run before any work is done.

    Raises:
        UsageError: the devices cannot be used in this mode, or there is no pool to use.
        DeviceError: a requested GPU does not exist.
    """
    for warning in ignored_variables():
        _log.warning("%s", warning)
    if where.mode == "pool":
        from flows.pool import PoolLanes

        return PoolLanes(where, devices)
    progress = FlowProgress() if in_flow() else current_progress()
    resolved = resolve_devices(devices)
    # The process of a flow answers Prefect meanwhile; that of a GPU has begun its imports (`start_early`).
    in_processes = in_flow() or resolved[0] != "cpu"
    return LocalLanes(resolved, LaneRows(progress), in_processes=in_processes)


@contextmanager
def recording(
    folder: Path, out: str, where: LaneSettings, entry: Callable[[], Entry] | None = None
) -> Iterator[Steps]:
    """The steps of a run in `folder`, which is logged in MLflow at the end of the block, by default as `run_entry`."""
    steps = (FlowSteps if in_flow() else Steps)(
        on_step=lambda name: current_progress().stage(name),
        run_as="flow" if in_flow() else "process",
        labels={"mode": where.mode},
        links=flow_links(),
    )
    start_tracking(steps.id, run_tags(folder))
    yield steps
    track(entry or partial(run_entry, folder), output_path(out))


def end_mlflow_runs(flow: "Flow[..., Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """A hook for flows that do not complete: their MLflow runs are not at work any more."""
    end_runs(str(flow_run.id), "FAILED" if state.is_failed() else "KILLED")
