"""The four flows that somebody asks for: predict, embed, train and evaluate."""

from collections.abc import Callable
from typing import Any

from prefect import Flow, flow
from prefect.flows import FlowStateHook

from flows import runs
from flows.recording import end_mlflow_runs, run_name
from tasks.artifacts import begin_flow
from tasks.heads import HeadReport
from tasks.stages import P, R
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import (
    EMBED_DEFAULTS,
    PREDICT_DEFAULTS,
    TRAIN_DEFAULTS,
    EmbedSettings,
    LaneMode,
    LaneSettings,
    PositiveTime,
    PredictSettings,
    Priority,
    Project,
    TrainSettings,
)
from virnuc_core.training.labels import LabelledFiles


def run_flow(name: str, name_of_run: Callable[[], str] = run_name) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """A flow whose MLflow run ends with it, however that is."""
    hooks: list[FlowStateHook[..., Any]] = [end_mlflow_runs]
    return flow(
        name=name,
        flow_run_name=name_of_run,
        persist_result=False,
        on_failure=hooks,
        on_crashed=hooks,
        on_cancellation=hooks,
    )


@run_flow("predict")
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


@run_flow("embed")
def embed(
    inputs: list[str],
    out: str,
    model: str,
    settings: EmbedSettings = EMBED_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> RunReport:
    """Embeds proteins with ESM-2 or DNA with DNABERT-S; called again, it resumes.

    Args:
        inputs: FASTA or FASTQ files, plain or compressed; paths or URLs.
        out: the embeddings file, a path or a URL of object storage; the run's folder is beside it, `OUT.run`.
        model: `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a path alone.
        settings: how to run the model.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    return runs.embed(inputs, out, model, settings, force, where)


@run_flow("train")
def train(
    files: LabelledFiles,
    out: str,
    settings: TrainSettings = TRAIN_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> HeadReport:
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


@run_flow("evaluate")
def evaluate(
    files: LabelledFiles,
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> HeadReport:
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
