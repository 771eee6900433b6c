"""The evaluate flow: metrics of a head on labelled sequences."""

from prefect import flow

from flows import runs
from flows.recording import ON_END, labelled_name
from tasks.artifacts import begin_flow
from tasks.heads import EvaluationReport
from virnuc_core.settings import (
    PREDICT_DEFAULTS,
    LaneMode,
    LaneSettings,
    PositiveTime,
    PredictSettings,
    Priority,
    Project,
)
from virnuc_core.training.labels import LabelledFiles


@flow(
    name="evaluate",
    flow_run_name=labelled_name,
    persist_result=False,
    on_failure=ON_END,
    on_crashed=ON_END,
    on_cancellation=ON_END,
)
def evaluate(
    files: LabelledFiles,
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> EvaluationReport:
    """Measures a head on labelled records; called again with the same arguments, it resumes.

    Args:
        files: labelled sequences.
        out: folder of the figures; the run of `predict` that they come from is in `run` there.
        settings: models, head and how to run them.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    return runs.evaluate(files, out, settings, force, where)
