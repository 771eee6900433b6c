"""The end of a run: its report on the disk, in Prefect and in MLflow."""

from collections.abc import Sequence
from pathlib import Path

from prefect.runtime import flow_run

from tasks.artifacts import show_tables
from tasks.reporting import RunReport, write_report
from tasks.stage import stage
from tasks.tracking import TrackedRun, Value
from virnuc_core.run_plan import RunFolder, RunPlan


@stage
def publish(folder: RunFolder, report: RunReport, tracked: TrackedRun) -> None:
    """Writes run.json first, so that the run is whole on the disk whatever becomes of its records elsewhere."""
    write_report(folder.report, report)
    tables = (folder.predictions, folder.contigs, folder.rejected)
    tracked.log_metrics(report.figures)
    tracked.log_files([path for path in (*tables, folder.report) if path.exists()])
    show_tables(report)


def prefect_tags(out: Path) -> dict[str, str]:
    """What an MLflow run says about the flow run that it belongs to."""
    tags = {
        "prefect.flow_run_id": flow_run.id,
        "prefect.flow_run_name": flow_run.name,
        "prefect.flow_run_url": flow_run.ui_url,
        "virnuc.out": str(out.resolve()),
    }
    # A temporary server has no pages to link to, and Prefect writes their missing address as "None".
    return {name: value for name, value in tags.items() if value and not value.startswith("None/")}


def params_of(plan: RunPlan, devices: Sequence[str]) -> dict[str, Value]:
    """Every resolved setting of a run, flat, so that runs can be compared column by column."""
    params: dict[str, Value] = {
        "kind": plan.kind,
        "inputs": ",".join(file.name for file in plan.inputs),
        "input_digest": plan.input_digest,
        "plan_fingerprint": plan.fingerprint,
        "chunk_length": plan.chunk_length,
        "embeddings": plan.embeddings,
        "devices": ",".join(devices),
        "shards": len(plan.shards),
        "head": plan.head.name if plan.head else None,
        "head_fingerprint": plan.head.fingerprint if plan.head else None,
        "virnuc_version": plan.virnuc_version,
    }
    for model in plan.models:
        params |= {
            f"{model.family}_model": model.name,
            f"{model.family}_weights_fingerprint": model.weights_fingerprint,
            f"{model.family}_embedding_dim": model.spec.embedding_dim,
            f"{model.family}_num_layers": model.spec.num_layers,
            f"{model.family}_repr_layer": model.repr_layer,
            f"{model.family}_precision": model.precision,
            f"{model.family}_engine": model.engine,
            f"{model.family}_attention": model.attention,
            f"{model.family}_compile_mode": model.compile_mode,
            f"{model.family}_token_budget": model.token_budget,
        }
    return params
