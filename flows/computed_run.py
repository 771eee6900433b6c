"""What the flows share: names, lanes, stages as Prefect tasks, and the MLflow run."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from flows.lanes import FlowLanes, LocalLanes
from flows.pool import PoolLanes
from tasks.artifacts import add_run_tag
from tasks.lanes import current_progress
from tasks.pages.markdown import size
from tasks.publishing import PROJECT_TAG, link_run, params_of, prefect_tags, publish
from tasks.registry import Config, with_registered_head
from tasks.stages import as_tasks, resumable_task
from tasks.tracking import TrackedRun, Value, tracked_run
from virnuc_core import pipeline
from virnuc_core.env_config import ignored_variables
from virnuc_core.inference.device import resolve_devices
from virnuc_core.models.catalogue import is_registered
from virnuc_core.pipeline import Run, Stage, run_stages, with_transfers
from virnuc_core.remote import file_name, require_shared_staging
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import LaneMode, LaneSettings

fetch_head = resumable_task(with_registered_head).with_options(name="fetch-head")

_log = logging.getLogger(__name__)


def run_name() -> str:
    """Command, sample and size: "predict contigs.fa tiny 12.3 MB"."""
    parameters: dict[str, Any] = flow_run.parameters
    models = parameters.get("model") or getattr(parameters["settings"], "preset", "")
    sample, size_of_all = _sample_and_size(parameters["inputs"])
    return f"{flow_run.flow_name} {sample} {models} {size_of_all}"


def labelled_name() -> str:
    """Command, files and their size: "train viruses.fa and 2 more 12.3 MB"."""
    from virnuc_core.training.labels import LabelledFiles  # slow imports

    files = flow_run.parameters["files"]
    if isinstance(files, dict):  # parameters of a deployment
        files = LabelledFiles(**files)
    return " ".join([flow_run.flow_name, *_sample_and_size(files.paths)])


def choose_lanes(where: LaneSettings, devices: tuple[str, ...]) -> FlowLanes:
    """Finds the devices or the pool for a run before any work is done.

    Raises:
        UsageError: the devices cannot be used in this mode, or there is no pool to use.
        DeviceError: a requested GPU does not exist.
    """
    for warning in ignored_variables():
        _log.warning("%s", warning)
    return LocalLanes(resolve_devices(devices)) if where.mode == "local" else PoolLanes(where, devices)


def _publish(run: Run, tracked: TrackedRun) -> None:
    publish(run.folder, run.report, tracked)


def with_local_head(config: Config, mode: LaneMode, before: Path | None) -> Config:
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
    params: Mapping[str, Value],
    publish_run: Callable[[Run, TrackedRun], None] = _publish,
) -> RunReport:
    """Runs the stages of a run of `FlowLanes`; from the plan on, an MLflow run with `params` records them.

    The stage `publish` is replaced by `publish_run`; `embed` must be one of the others.

    Raises:
        VirnucError: from a stage.
    """
    if project := flow_run.parameters.get("project"):
        add_run_tag(f"{PROJECT_TAG}:{project}")
    stages = with_transfers(run, stages)
    planned, root = stages.index(pipeline.embed), run.folder.root
    tell = lambda stage: current_progress().stage(stage)  # noqa: E731
    run_stages(run, as_tasks(stages[:planned]), tell)
    assert isinstance(run.lanes, FlowLanes)
    params = {**params, "devices": run.lanes.shown_devices, **params_of(run.plan)}
    if isinstance(run, pipeline.Move):
        params["reprocessed_from"] = run.old.fingerprint
    with tracked_run(flow_run.name, params, prefect_tags(root), root) as tracked:
        run.links = tracked.links
        if run.inputs:
            link_run(tracked, run.plan.inputs, run.origins)

        def publish(run: Run) -> None:
            publish_run(run, tracked)

        rest = [publish if stage is pipeline.publish else stage for stage in stages[planned:]]
        run_stages(run, as_tasks(rest), tell)
    return run.report


def _sample_and_size(paths: Sequence[str]) -> tuple[str, str]:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    num_bytes = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    return f"{file_name(paths[0]) if paths else ''}{more}", size(num_bytes)
