"""Sequence files in, one mean vector a sequence out."""

from pathlib import Path

from prefect import flow

from flows.lanes import choose_lanes, run_lanes
from flows.naming import run_name
from flows.outputs import require_absolute, require_no_input
from tasks.artifacts import attach_api_log_handler
from tasks.indexing import index
from tasks.lanes import LaneTracking, stage_clock
from tasks.publishing import link_run, params_of, prefect_tags, publish
from tasks.results import aggregate, validate
from tasks.tracking import tracked_run
from virnuc_core.models.checkpoints import family_of
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX
from virnuc_core.settings import EMBED_DEFAULTS, EmbedSettings, LaneMode, PositiveTime, embed_config


@flow(name="embed", flow_run_name=run_name, persist_result=False)
def embed(
    inputs: list[str],
    out: str,
    model: str,
    settings: EmbedSettings = EMBED_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
) -> RunReport:
    """Embeds proteins with ESM-2 or DNA with DNABERT-S; called again, it goes on where it stopped.

    Args:
        inputs: FASTA or FASTQ files, plain or compressed.
        out: the embeddings file; the run's folder is beside it, `OUT.run`.
        model: `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a path alone.
        settings: how to run the model.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    attach_api_log_handler()
    require_absolute(*inputs, out)
    family, name = family_of(model)
    config = embed_config(family, name, settings)
    require_no_input(Path(out), inputs)
    lanes = choose_lanes(mode, config.devices, lane_minutes)
    asked = {**lanes.settings, "lane_minutes": lane_minutes, "shard_seconds": settings.shard_seconds}
    clock = stage_clock()
    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force) as folder:
        if force:
            Path(out).unlink(missing_ok=True)
        with clock.stage("index"):
            index(folder, inputs, None, "protein" if family == "esm2" else "dna")
        with clock.stage("plan"):
            planned = lanes.plan(folder, config, "embed")
        with tracked_run(run_name(), params_of(planned, asked), prefect_tags(folder.root)) as tracked:
            link_run(tracked, planned.inputs, inputs)
            with clock.stage("embed"), LaneTracking(tracked) as lane_tracking:
                reports = run_lanes(lanes, folder, [lane_tracking])
            with clock.stage("validate"):
                validate(folder)
            with clock.stage("aggregate"):
                work = aggregate(folder, Path(out))
            report = RunReport(
                plan=planned,
                out=out,
                counts=None,
                work=work,
                lanes=reports,
                seconds=clock.seconds,
                links=tracked.links,
            )
            with clock.stage("publish"):
                publish(folder, report, tracked)
    return report
