"""The embed flow: one mean vector per sequence."""

from pathlib import Path

from prefect import flow

from flows.computed_run import choose_lanes, compute_run, run_name
from flows.outputs import require_absolute, require_no_input
from tasks.artifacts import attach_api_log_handler
from virnuc_core.models.hub import family_of
from virnuc_core.pipeline import EMBED, Run
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX
from virnuc_core.settings import (
    EMBED_DEFAULTS,
    EmbedSettings,
    LaneMode,
    LaneSettings,
    PositiveTime,
    Priority,
    embed_config,
)


@flow(name="embed", flow_run_name=run_name, persist_result=False)
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
    """Embeds proteins with ESM-2 or DNA with DNABERT-S; called again, it resumes.

    Args:
        inputs: FASTA or FASTQ files, plain or compressed.
        out: the embeddings file; the run's folder is beside it, `OUT.run`.
        model: `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a path alone.
        settings: how to run the model.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
    """
    attach_api_log_handler()
    require_absolute(*inputs, out)
    config = embed_config(*family_of(model), settings)
    require_no_input(Path(out), inputs)
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
    lanes, params = choose_lanes(where, config.devices), {**settings.params, **where.params}
    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force) as folder:
        if force:
            Path(out).unlink(missing_ok=True)
        run = Run(folder, config, "embed", lanes=lanes, inputs=inputs, out=out)
        return compute_run(run, EMBED, params)
