"""The reprocess flow: an existing run with other models, another head or other settings."""

from prefect import flow
from prefect.runtime import flow_run

from flows import runs
from flows.computed_run import ON_END
from tasks.artifacts import attach_api_log_handler
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import (
    REPROCESS_DEFAULTS,
    LaneMode,
    LaneSettings,
    PositiveTime,
    Priority,
    Project,
    ReprocessSettings,
)


def reprocess_name() -> str:
    """Name of a flow run."""
    return runs.reprocess_title(flow_run.parameters["run"])


@flow(
    name="reprocess",
    flow_run_name=reprocess_name,
    persist_result=False,
    on_failure=ON_END,
    on_crashed=ON_END,
    on_cancellation=ON_END,
)
def reprocess(
    run: str,
    settings: ReprocessSettings = REPROCESS_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> RunReport:
    """Moves a run to other models, another head or other settings; called again, it resumes.

    What both runs have in common is kept. The old run stays as it is until the new one is complete.

    Args:
        run: folder of a predict run.
        settings: what is to change.
        force: throw away what was begun with other settings.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    attach_api_log_handler()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    return runs.reprocess(run, settings, force, where)
