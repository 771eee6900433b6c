"""What predict and embed do: the body of their flows, and of a run without Prefect."""

from collections.abc import Sequence
from pathlib import Path

from flows.computed_run import choose_lanes, compute_run
from flows.outputs import is_embeddings_file, require_no_input, require_places, require_replaceable
from virnuc_core.models.hub import family_of
from virnuc_core.pipeline import EMBED, PREDICT, Run
from virnuc_core.remote import output_path
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX
from virnuc_core.settings import (
    EmbedSettings,
    LaneSettings,
    PredictSettings,
    embed_config,
    predict_config,
)


def predict(
    inputs: Sequence[str], out: str, settings: PredictSettings, force: bool, where: LaneSettings
) -> RunReport:
    """See the flow `predict`; raises VirnucError."""
    require_places(inputs, out, where.mode)
    config = predict_config(settings)
    lanes = choose_lanes(where, config.devices)
    with open_run_folder(output_path(out), force=force, inputs=inputs) as folder:
        run = Run(folder, config, "predict", lanes=lanes, inputs=inputs, out=out, force=force)
        return compute_run(run, PREDICT, where)


def embed(
    inputs: Sequence[str], out: str, model: str, settings: EmbedSettings, force: bool, where: LaneSettings
) -> RunReport:
    """See the flow `embed`; raises VirnucError."""
    require_places(inputs, out, where.mode)
    config = embed_config(*family_of(model), settings)
    path = output_path(out)
    require_no_input(path, inputs)
    require_replaceable(path, is_embeddings_file, "embeddings file", force=force)
    lanes = choose_lanes(where, config.devices)
    with open_run_folder(Path(f"{path}{EMBED_SUFFIX}"), force=force, inputs=inputs) as folder:
        if force:
            path.resolve().unlink(missing_ok=True)
        run = Run(folder, config, "embed", lanes=lanes, inputs=inputs, out=out, force=force)
        return compute_run(run, EMBED, where)
