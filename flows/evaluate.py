"""The evaluate flow: metrics of a head on labelled sequences."""

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.computed_run import labelled_name
from flows.outputs import require_absolute
from flows.predict import predict
from tasks.artifacts import attach_api_log_handler
from tasks.heads import RUN_NAME, EvaluationReport, evaluate_run
from tasks.publishing import link_run, prefect_tags
from tasks.stages import resumable_task
from tasks.tracking import Value, tracked_run
from virnuc_core.errors import UsageError
from virnuc_core.models.catalogue import chunk_rule_of, head_of, is_registered
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import (
    PREDICT_DEFAULTS,
    LaneMode,
    PositiveTime,
    PredictSettings,
    Priority,
    Project,
    predict_config,
)
from virnuc_core.training.heads import label_records
from virnuc_core.training.labels import LabelledFiles

read_labels = resumable_task(label_records).with_options(name="label")


@flow(name="evaluate", flow_run_name=labelled_name, persist_result=False)
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
    attach_api_log_handler()
    require_absolute(*files.paths, out)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {out} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    config = predict_config(settings)
    params: dict[str, Value] = {
        **settings.params,
        "kind": "evaluate",
        "head": Path(head_of(config)).name,
        "chunk_length": config.chunk_length if is_registered(config.head) else chunk_rule_of(config),
        "files": ",".join(Path(path).name for path in files.paths),
        "mode": mode,
    }
    with tracked_run(flow_run.name, params, prefect_tags(folder), folder) as tracked:
        labelled = read_labels(files, RunFolder(folder), None, kinship=False)
        link_run(tracked, labelled.files, [path for path in files.paths if path != files.labels])
        run = predict(
            labelled.paths, str(folder / RUN_NAME), settings, force, mode, lane_minutes, priority, project
        )
        return evaluate_run(folder, run, labelled.table, tracked)
