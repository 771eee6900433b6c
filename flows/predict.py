"""Sequence files in, viral calls out: the whole of virnuc, stage by stage."""

from pathlib import Path

from prefect import flow

from flows.lanes import run_lanes
from flows.naming import run_name
from flows.settings import PREDICT_DEFAULTS, PredictSettings, predict_config
from tasks.embedding import find_pending
from tasks.indexing import index
from tasks.planning import plan
from tasks.progress import StageClock
from tasks.publishing import params_of, prefect_tags, publish
from tasks.reporting import RunReport
from tasks.results import aggregate, classify, validate
from tasks.run_folder import open_run_folder
from tasks.tracking import tracked_run
from virnuc_core.inference.device import resolve_devices


@flow(name="predict", flow_run_name=run_name, persist_result=False)
def predict(
    inputs: list[str], out: str, settings: PredictSettings = PREDICT_DEFAULTS, force: bool = False
) -> RunReport:
    """Calls contigs viral or not; called again with the same arguments, it goes on where it stopped.

    Args:
        inputs: FASTA or FASTQ files of DNA, plain or compressed.
        out: folder for the results.
        settings: models and how to run them.
        force: keep nothing of an earlier run in that folder.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    config = predict_config(settings)
    devices = resolve_devices(config.devices)
    clock = StageClock()
    with open_run_folder(Path(out), force=force) as folder:
        with clock.stage("index"):
            index(folder, inputs, config.chunk_length, "dna")
        with clock.stage("plan"):
            planned = plan(folder, config, "predict", devices)
        with tracked_run(run_name(), params_of(planned, devices), prefect_tags(folder.root)) as tracked:
            with clock.stage("embed"):
                lanes = run_lanes(folder, find_pending(folder), devices)
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
                lanes=lanes,
                seconds=clock.seconds,
                links=tracked.links,
            )
            with clock.stage("publish"):
                publish(folder, report, tracked)
    return report
