"""The train flow: a classifier head from labelled sequences."""

from prefect import flow

from flows import runs
from flows.recording import ON_END, labelled_name
from tasks.artifacts import begin_flow
from tasks.heads import TrainingReport
from virnuc_core.settings import (
    TRAIN_DEFAULTS,
    LaneMode,
    LaneSettings,
    PositiveTime,
    Priority,
    Project,
    TrainSettings,
)
from virnuc_core.training.labels import LabelledFiles


@flow(
    name="train",
    flow_run_name=labelled_name,
    persist_result=False,
    on_failure=ON_END,
    on_crashed=ON_END,
    on_cancellation=ON_END,
)
def train(
    files: LabelledFiles,
    out: str,
    settings: TrainSettings = TRAIN_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> TrainingReport:
    """Trains a head; called again with the same arguments, it resumes.

    Args:
        files: labelled sequences; paths or URLs.
        out: file of the head, safetensors; the run's folder is beside it, `OUT.run`, and so is its card.
        settings: models, and how the head is fitted.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    return runs.train(files, out, settings, force, where)
