"""The reprocess flow: an existing run with other models, another head or other settings."""

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.computed_run import choose_lanes, compute_run, with_local_head
from flows.outputs import require_absolute, require_run
from tasks.artifacts import attach_api_log_handler
from virnuc_core.pipeline import REPROCESS, Move
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
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
    """Such as "reprocess my-results"."""
    return f"reprocess {Path(flow_run.parameters['run']).name}"


@flow(name="reprocess", flow_run_name=reprocess_name, persist_result=False)
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
    require_absolute(run)
    require_run(Path(run))
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    lanes, params = choose_lanes(where, settings.devices), {**settings.params, **where.params}
    with open_run_folder(Path(run), force=False) as folder:
        settings = with_local_head(settings, mode, None if force else folder.next.plan)
        move = Move(folder, settings, lanes, force=force)
        return compute_run(move, REPROCESS, params)
