"""Publishes a finished run on disk, in Prefect and in MLflow, with links between the three."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tasks.artifacts import add_run_tag, in_flow, show_link, show_markdown, show_table
from tasks.pages.run_page import packing_rows, run_page, speed_rows, verdict
from tasks.stages import Resumable
from tasks.tracking import TrackedRun, Value
from virnuc_core.inference.plan import RunPlan
from virnuc_core.results.report.reading import iter_batches
from virnuc_core.results.report.totals import BINS, histogram
from virnuc_core.results.run_json import RunReport, write_report
from virnuc_core.results.tables import PREDICTION_SCHEMAS
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import InputFile

PROJECT_TAG: Final = "virnuc.project"


@Resumable
def publish(folder: RunFolder, report: RunReport, tracked: TrackedRun) -> None:
    """Writes report.html and run.json first, so that the run is complete on disk whatever fails elsewhere."""
    flow_page = _flow_tags().get("prefect.flow_run_url")
    links = {**report.links, **({"prefect_flow_run_url": flow_page} if flow_page else {})}
    write_report(folder.report, replace(report, links=links))

    places = {"report": str(folder.page.resolve())} if folder.page.exists() else {}
    places["figures"] = str(folder.report.resolve())
    mlflow = report.links.get("mlflow_run_url") or report.links.get("mlflow_run_id")
    in_mlflow = {"MLflow": mlflow} if mlflow else {}
    show_markdown("virnuc-summary", run_page(report, {**places, **in_mlflow}), verdict(report))
    if report.lanes:
        show_table("virnuc-lanes", speed_rows(report, folder), "Where each lane worked, and how fast")
    show_table("virnuc-packing", packing_rows(report), "How full the batches of each model were")

    in_prefect = {"Prefect": flow_page} if flow_page else {}
    tracked.describe(run_page(report, {**places, **in_prefect}))
    tracked.log_metrics(report.figures)
    tables = (folder.predictions, folder.contigs, folder.regions, folder.rejected)
    tracked.log_files([path for path in (*tables, folder.page, folder.report) if path.exists()])
    if report.lanes:
        tracked.log_table("lanes", report.lane_rows)
    if folder.predictions.exists():
        counts = count_p_virus(folder, report.plan)
        tracked.log_figure("p_virus", counts=counts.tolist(), threshold=report.plan.threshold)


def count_p_virus(folder: RunFolder, plan: RunPlan) -> npt.NDArray[np.int64]:
    """Histogram over the scored chunks of a run."""
    counts = np.zeros(BINS, np.int64)
    for batch in iter_batches(folder.predictions_parquet, PREDICTION_SCHEMAS[plan.frames], ["p_virus"]):
        counts += histogram(batch["p_virus"].drop_null().to_numpy())
    return counts


def link_run(tracked: TrackedRun, files: Sequence[InputFile], paths: Sequence[str]) -> None:
    """Links an MLflow run to its input files and flow run; `paths` are in the order of `files`."""
    tracked.log_inputs(files, paths)
    if not in_flow():
        return
    links = tracked.links
    if "mlflow_run_id" in links:
        add_run_tag(f"mlflow:{links['mlflow_run_id']}")
    if "mlflow_run_url" in links:
        show_link("virnuc-mlflow", links["mlflow_run_url"], "This run in MLflow")


def run_tags(out: Path, project: str = "") -> dict[str, str]:
    """Tags of an MLflow run that identify its folder, its project and its flow run."""
    return {"virnuc.out": str(out.resolve()), **({PROJECT_TAG: project} if project else {}), **_flow_tags()}


def _flow_tags() -> dict[str, str]:
    """Empty outside of a flow."""
    if not in_flow():
        return {}
    from prefect.runtime import flow_run

    tags = {
        "prefect.flow_run_id": flow_run.id,
        "prefect.flow_run_name": flow_run.name,
        "prefect.flow_run_url": flow_run.ui_url,
    }
    # A temporary server has no pages to link to, and Prefect writes their missing address as "None".
    return {name: value for name, value in tags.items() if value and not value.startswith("None/")}


def params_of(plan: RunPlan) -> dict[str, Value]:
    """Every resolved setting of a run, flat for comparison by column."""
    params: dict[str, Value] = {
        "kind": plan.kind,
        "inputs": ",".join(file.name for file in plan.inputs),
        "input_digest": plan.input_digest,
        "plan_fingerprint": plan.fingerprint,
        "chunk_length": plan.chunk_length,
        "min_length": plan.min_length,
        "frames": plan.frames,
        "threshold": plan.threshold,
        "fdr": plan.fdr,
        "embeddings": plan.embeddings,
        "shards": len(plan.shards),
        "head": plan.head.name if plan.head else None,
        "head_fingerprint": plan.head.fingerprint if plan.head else None,
        "virnuc_version": plan.virnuc_version,
        "switches": ",".join(
            dict.fromkeys((*plan.switches, *(s for p in plan.continued for s in p.switches)))
        ),
    }
    names = ("weights_fingerprint", "repr_layer", "precision", "engine", "attention", "compiled")
    for model in plan.models:
        own = {name: getattr(model, name) for name in (*names, "token_budget")}
        own |= {name: getattr(model.spec, name) for name in ("embedding_dim", "num_layers")}
        params |= {f"{model.family}_{name}": value for name, value in {"model": model.name, **own}.items()}
    return params
