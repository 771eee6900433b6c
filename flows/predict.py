"""The predict flow: viral calls for sequence files."""

from prefect import flow

from flows import runs
from flows.recording import ON_END, run_name
from tasks.artifacts import begin_flow
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import (
    PREDICT_DEFAULTS,
    LaneMode,
    LaneSettings,
    PositiveTime,
    PredictSettings,
    Priority,
    Project,
)


@flow(
    name="predict",
    flow_run_name=run_name,
    persist_result=False,
    on_failure=ON_END,
    on_crashed=ON_END,
    on_cancellation=ON_END,
)
def predict(
    inputs: list[str],
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> RunReport:
    """Calls contigs viral or not; called again with the same arguments, it resumes.

    Args:
        inputs: FASTA or FASTQ files of DNA, plain or compressed; paths or URLs.
        out: folder for the results; a path, or a URL of object storage.
        settings: models and how to run them.
        force: keep nothing of an earlier run in that folder.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    return runs.predict(inputs, out, settings, force, where)
