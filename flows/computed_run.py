"""What all runs share, in a flow and without one: names, lanes, stages that are retried, and the MLflow run.

Prefect is imported in a flow alone.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts import add_run_tag, in_flow
from tasks.local_lanes import LocalLanes, WatchedLanes
from tasks.pages.markdown import size
from tasks.progress import current_progress
from tasks.publishing import PROJECT_TAG, link_run, params_of, publish, run_tags
from tasks.registry import with_registered_head
from tasks.stages import Resumable, resumable
from tasks.tracking import TrackedRun, Value, tracked_run
from virnuc_core import pipeline
from virnuc_core.env_config import ignored_variables
from virnuc_core.inference.device import resolve_devices
from virnuc_core.models.catalogue import is_registered
from virnuc_core.pipeline import Run, Stage, run_stages, with_transfers
from virnuc_core.remote import file_name, require_shared_staging
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import LaneMode, LaneSettings, RunConfig

fetch_head = Resumable(with_registered_head, "fetch-head")

_log = logging.getLogger(__name__)


def run_title(command: str, inputs: Sequence[str], models: str = "") -> str:
    """Command, sample and size: "predict contigs.fa and 2 more tiny 12.3 MB"."""
    more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
    num_bytes = sum(os.path.getsize(path) for path in inputs if os.path.isfile(path))
    sample = f"{file_name(inputs[0]) if inputs else ''}{more}"
    return " ".join([command, sample, *filter(None, [models]), size(num_bytes)])


def run_name() -> str:
    """Name of a flow run: its title."""
    from prefect.runtime import flow_run

    parameters: dict[str, Any] = flow_run.parameters
    models = str(parameters.get("model") or getattr(parameters["settings"], "preset", ""))
    return run_title(str(flow_run.flow_name), parameters["inputs"], models)


def labelled_name() -> str:
    """As `run_name`, for a flow that takes labelled files."""
    from prefect.runtime import flow_run

    from virnuc_core.training.labels import LabelledFiles  # slow imports

    files = flow_run.parameters["files"]
    if isinstance(files, dict):  # parameters of a deployment
        files = LabelledFiles(**files)
    return run_title(str(flow_run.flow_name), files.paths)


def name_of_run(title: str) -> str:
    """Name of the flow run, or a title outside of a flow."""
    if not in_flow():
        return title
    from prefect.runtime import flow_run

    return str(flow_run.name)


def choose_lanes(where: LaneSettings, devices: tuple[str, ...]) -> WatchedLanes:
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
    if not in_flow():
        return LocalLanes(resolve_devices(devices))
    from flows.lanes import embed_lane

    return LocalLanes(resolve_devices(devices), embed_lane)


def _publish(run: Run, tracked: TrackedRun) -> None:
    publish(run.folder, run.report, tracked)


def with_local_head(config: RunConfig, mode: LaneMode, before: Path | None) -> RunConfig:
    """Replaces a head of the MLflow registry by its path, with the version of `before`, the plan of an earlier attempt.

    Raises:
        VirnucError: there is no such head, or other processes could not see its file.
    """
    if not is_registered(config.head):
        return config
    if mode == "pool":
        require_shared_staging("a head of the MLflow registry")
    return fetch_head(config, before)


def compute_run(
    run: Run,
    stages: Sequence[Stage],
    title: str,
    where: LaneSettings,
    settings: Mapping[str, Value],
    publish_run: Callable[[Run, TrackedRun], None] = _publish,
) -> RunReport:
    """Runs the stages of a run of `WatchedLanes`; from the plan on, an MLflow run with its settings records them.

    The stage `publish` is replaced by `publish_run`; `embed` must be one of the others.

    Raises:
        VirnucError: from a stage.
    """
    if where.project:
        add_run_tag(f"{PROJECT_TAG}:{where.project}")
    run.run_as = "flow" if in_flow() else "process"
    stages = with_transfers(run, stages)
    planned, root = stages.index(pipeline.embed), run.folder.root
    tell = lambda stage: current_progress().stage(stage)  # noqa: E731
    run_stages(run, resumable(stages[:planned]), tell)
    assert isinstance(run.lanes, WatchedLanes)
    params = {**settings, **where.params, "devices": run.lanes.shown_devices, **params_of(run.plan)}
    with tracked_run(name_of_run(title), params, run_tags(root, where.project), root) as tracked:
        if run.inputs:
            link_run(tracked, run.plan.inputs, run.origins)

        def publish(run: Run) -> None:
            run.links = tracked.links  # waits for MLflow
            publish_run(run, tracked)

        rest = [publish if stage is pipeline.publish else stage for stage in stages[planned:]]
        run_stages(run, resumable(rest), tell)
    return run.report
