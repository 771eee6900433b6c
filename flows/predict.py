"""Sequence files in, viral calls out: the whole of virnuc, stage by stage."""

from pathlib import Path

from prefect import flow

from flows.lanes import choose_lanes, run_lanes
from flows.naming import run_name
from flows.outputs import require_absolute
from tasks.artifacts import attach_api_log_handler
from tasks.indexing import index
from tasks.lanes import LaneTracking, stage_clock
from tasks.publishing import link_run, params_of, prefect_tags, publish
from tasks.results import aggregate, classify, validate
from tasks.tracking import Value, tracked_run
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.settings import PREDICT_DEFAULTS, LaneMode, PositiveTime, PredictSettings, predict_config


@flow(name="predict", flow_run_name=run_name, persist_result=False)
def predict(
    inputs: list[str],
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
) -> RunReport:
    """Calls contigs viral or not; called again with the same arguments, it goes on where it stopped.

    Args:
        inputs: FASTA or FASTQ files of DNA, plain or compressed.
        out: folder for the results.
        settings: models and how to run them.
        force: keep nothing of an earlier run in that folder.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    attach_api_log_handler()
    require_absolute(*inputs, out)
    config = predict_config(settings)
    lanes = choose_lanes(mode, config.devices, lane_minutes)
    asked: dict[str, Value] = {
        **lanes.settings,
        "lane_minutes": lane_minutes,
        "shard_seconds": settings.shard_seconds,
        "preset": settings.preset,
    }
    clock = stage_clock()
    with open_run_folder(Path(out), force=force) as folder:
        with clock.stage("index"):
            index(folder, inputs, config.chunk_length, "dna", config.rows, config.min_length)
        with clock.stage("plan"):
            planned = lanes.plan(folder, config, "predict")
        with tracked_run(run_name(), params_of(planned, asked), prefect_tags(folder.root)) as tracked:
            link_run(tracked, planned.inputs, inputs)
            with clock.stage("embed"), LaneTracking(tracked) as lane_tracking:
                reports = run_lanes(lanes, folder, [lane_tracking])
            with clock.stage("validate"):
                validate(folder)
            with clock.stage("aggregate"):
                work = aggregate(folder, folder.embeddings)
            with clock.stage("classify"):
                counts = classify(folder)
            report = RunReport(
                plan=planned,
                out=out,
                counts=counts,
                work=work,
                lanes=reports,
                seconds=clock.seconds,
                links=tracked.links,
            )
            with clock.stage("publish"):
                publish(folder, report, tracked)
    return report
