"""A finished or unfinished run in, the same run with other models, head or settings out."""

from pathlib import Path

from prefect import flow

from flows.lanes import choose_lanes, run_lanes
from flows.naming import reprocess_name
from flows.outputs import require_absolute, require_run
from tasks.artifacts import attach_api_log_handler
from tasks.lanes import LaneTracking, stage_clock
from tasks.publishing import params_of, prefect_tags, publish
from tasks.reprocessing import move_to_next
from tasks.results import aggregate, classify, validate
from tasks.tracking import tracked_run
from virnuc_core.pipeline import reprocess_config
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import drop_next, open_next, open_run_folder
from virnuc_core.run_plan import read_plan
from virnuc_core.settings import (
    REPROCESS_DEFAULTS,
    LaneMode,
    PositiveTime,
    ReprocessSettings,
)


@flow(name="reprocess", flow_run_name=reprocess_name, persist_result=False)
def reprocess(
    run: str,
    settings: ReprocessSettings = REPROCESS_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
) -> RunReport:
    """Moves a run to other models, another head or other settings; called again, it goes on where it stopped.

    What both runs have in common is kept. The old run stays as it is until the new one is whole.

    Args:
        run: folder of a predict run.
        settings: what shall be other than it was.
        force: throw away what was begun with other settings.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    attach_api_log_handler()
    require_absolute(run)
    require_run(Path(run))
    lanes = choose_lanes(mode, settings.devices, lane_minutes)
    clock = stage_clock()
    with open_run_folder(Path(run), force=False) as folder:
        with clock.stage("plan"):
            old = read_plan(folder.plan)
            following = open_next(folder, force=force)
            planned = lanes.plan(following, reprocess_config(old, settings), "predict")
            target = following if planned.fingerprint != old.fingerprint else folder
            if target is folder:
                drop_next(folder)
        asked = {**lanes.settings, "lane_minutes": lane_minutes, "reprocessed_from": old.fingerprint}
        with tracked_run(reprocess_name(), params_of(planned, asked), prefect_tags(folder.root)) as tracked:
            with clock.stage("embed"), LaneTracking(tracked) as lane_tracking:
                reports = run_lanes(lanes, target, [lane_tracking])
            with clock.stage("validate"):
                validate(target)
            with clock.stage("aggregate"):
                work = aggregate(target, target.embeddings)
            with clock.stage("classify"):
                counts = classify(target)
            if target is following:
                with clock.stage("replace"):
                    move_to_next(folder)
            report = RunReport(
                plan=planned,
                out=run,
                counts=counts,
                work=work,
                lanes=reports,
                seconds=clock.seconds,
                links=tracked.links,
            )
            with clock.stage("publish"):
                publish(folder, report, tracked)
    return report
