"""What the flows and the commands of the four runs do: the pipeline, its record in MLflow, and its pages in Prefect.

Prefect is imported in a flow alone.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.recording import choose_lanes, recording, require_absolute, require_places
from tasks.publishing import show_run
from tasks.run_entries import evaluation_entry
from virnuc_core import pipeline
from virnuc_core.models.hub import family_of
from virnuc_core.remote import is_url, output_path
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import EVALUATED_RUN, run_folder_of
from virnuc_core.settings import (
    EmbedSettings,
    LaneSettings,
    PredictSettings,
    TrainSettings,
    embed_config,
    predict_config,
    train_config,
)

if TYPE_CHECKING:  # slow imports, for heads alone
    from tasks.heads import HeadReport
    from virnuc_core.training.labels import LabelledFiles


def predict(
    inputs: Sequence[str], out: str, settings: PredictSettings, force: bool, where: LaneSettings
) -> RunReport:
    """See the flow `predict`; raises VirnucError."""
    require_places(inputs, out, where.mode)
    config, folder = predict_config(settings), output_path(out)
    lanes = choose_lanes(where, config.devices)
    with recording(folder, out, where) as steps:
        report = pipeline.predict(inputs, out, config, lanes, force=force, steps=steps)
        show_run(folder, report)
    return report


def embed(
    inputs: Sequence[str], out: str, model: str, settings: EmbedSettings, force: bool, where: LaneSettings
) -> RunReport:
    """See the flow `embed`; raises VirnucError."""
    require_places(inputs, out, where.mode)
    config, folder = embed_config(*family_of(model), settings), run_folder_of(output_path(out))
    lanes = choose_lanes(where, config.devices)
    with recording(folder, out, where) as steps:
        report = pipeline.embed(inputs, out, config, lanes, force=force, steps=steps)
        show_run(folder, report)
    return report


def train(
    files: "LabelledFiles", out: str, settings: TrainSettings, force: bool, where: LaneSettings
) -> "HeadReport":
    """See the flow `train`; raises VirnucError."""
    from tasks.heads import publish_training

    require_absolute(*itertools.filterfalse(is_url, files.paths), *filter(None, [settings.groups]), out)
    config, folder = train_config(settings), run_folder_of(out)
    lanes = choose_lanes(where, config.devices)
    with recording(folder, out, where) as steps:
        training = pipeline.train(
            files,
            out,
            config,
            settings,
            lanes,
            groups=settings.groups,
            force=force,
            steps=steps,
        )
        show_run(folder, training.run)
        return steps(publish_training, training)


def evaluate(
    files: "LabelledFiles", out: str, settings: PredictSettings, force: bool, where: LaneSettings
) -> "HeadReport":
    """See the flow `evaluate`; raises VirnucError."""
    from tasks.heads import publish_evaluation

    require_absolute(*files.paths, out)
    config, folder = predict_config(settings), Path(out) / EVALUATED_RUN
    lanes = choose_lanes(where, config.devices)
    with recording(folder, out, where, partial(evaluation_entry, Path(out))) as steps:
        evaluation = pipeline.evaluate(files, out, config, lanes, force=force, steps=steps)
        show_run(folder, evaluation.run)
        return steps(publish_evaluation, Path(out), evaluation)
