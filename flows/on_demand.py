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
) -> RunReport:
    """Classifies sequences as viral or non-viral; repeated with the same arguments, it resumes.

    Args:
        inputs: FASTA or FASTQ files of DNA, plain or compressed; paths or URLs.
        out: folder for the results; a path, or a URL of object storage.
        settings: models, classifier head and how to run them.
        force: overwrite existing results.
        mode: "local": one lane per device of this machine; "pool": lanes wait for the workers of a work pool.
        lane_minutes: estimated minutes of work per lane, in pool mode.
        priority: queue of the lanes, in pool mode.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
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
) -> RunReport:
    """Embeds proteins with ESM-2 or DNA with DNABERT-S; repeated with the same arguments, it resumes.

    Args:
        inputs: FASTA or FASTQ files, plain or compressed; paths or URLs.
        out: embeddings file, a path or a URL of object storage; the run folder is `OUT.run`.
        model: `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or only a path.
        settings: how to run the model.
        force: overwrite existing results.
        mode: "local": one lane per device of this machine; "pool": lanes wait for the workers of a work pool.
        lane_minutes: estimated minutes of work per lane, in pool mode.
        priority: queue of the lanes, in pool mode.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
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
) -> HeadReport:
    """Trains a classifier head; repeated with the same arguments, it resumes.

    Args:
        files: labelled sequences; paths or URLs.
        out: safetensors file of the head; the model card is next to it, and the run folder is `OUT.run`.
        settings: models, and how the head is fitted.
        force: overwrite existing results.
        mode: "local": one lane per device of this machine; "pool": lanes wait for the workers of a work pool.
        lane_minutes: estimated minutes of work per lane, in pool mode.
        priority: queue of the lanes, in pool mode.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
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
) -> HeadReport:
    """Measures accuracy on labelled sequences; repeated with the same arguments, it resumes.

    Args:
        files: labelled sequences.
        out: folder for the metrics; the `predict` run behind them is in its subfolder `run`.
        settings: models, head and how to run them.
        force: overwrite existing results.
        mode: "local": one lane per device of this machine; "pool": lanes wait for the workers of a work pool.
        lane_minutes: estimated minutes of work per lane, in pool mode.
        priority: queue of the lanes, in pool mode.
    """
    begin_flow()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
    return runs.evaluate(files, out, settings, force, where)
