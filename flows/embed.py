"""The embed flow: one mean vector per sequence."""

from prefect import flow

from flows import runs
from flows.recording import ON_END, run_name
from tasks.artifacts import begin_flow
from virnuc_core.results.run_json import RunReport
from virnuc_core.settings import (
    EMBED_DEFAULTS,
    EmbedSettings,
    LaneMode,
    LaneSettings,
    PositiveTime,
    Priority,
    Project,
)


@flow(
    name="embed",
    flow_run_name=run_name,
    persist_result=False,
    on_failure=ON_END,
    on_crashed=ON_END,
    on_cancellation=ON_END,
)
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
