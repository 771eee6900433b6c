"""Shows a finished run in Prefect."""

from pathlib import Path

from tasks.artifacts import in_flow, show_markdown, show_table
from tasks.pages.markdown import cell, code, model_name, table
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import RunFolder


def show_run(root: Path, report: RunReport) -> None:
    """Shows a finished run on the page of its flow run, if it is one."""
    if not in_flow():
        return
    folder = RunFolder(root)
    verdict = report.summary.partition("\n")[0]
    show_markdown("virnuc-summary", _summary(report, folder), verdict)
    rows = [
        {**row, "log": str(folder.lane_log(lane.journal).resolve()) if lane.journal else ""}
        for lane, row in zip(report.lanes, report.lane_rows, strict=True)
    ]
    if rows:
        show_table("virnuc-lanes", rows, "Host, device and speed of each lane")


def _summary(report: RunReport, folder: RunFolder) -> str:
    """Result, speed, models and places, as Markdown."""
    verdict, *more = report.summary.splitlines()
    places = [path.resolve() for path in (folder.page, folder.report) if path.exists()]
    models = [
        (
            model_name(model),
            f"{model.spec.embedding_dim}",
            model.arithmetic,
            f"{report.packing_efficiency.get(model.family, 1.0):.1%}",
            code(model.weights_fingerprint[:12]),
        )
        for model in report.plan.models
    ]
    lines = [
        f"# {cell(verdict)}",
        "",
        *(f"- {cell(line)}" for line in more),
        *(f"- {code(place)}" for place in places),
        "",
        table(("model", "dimensions", "arithmetic", "packing efficiency", "weights"), models),
    ]
    return "\n".join(lines) + "\n"


def run_tags(out: Path) -> dict[str, str]:
    """Tags of an MLflow run that identify its folder and its flow run."""
    return {
        "virnuc.out": str(out.resolve()),
        **{name.replace("_", ".", 1): text for name, text in flow_links().items()},
    }


def flow_links() -> dict[str, str]:
    """Id, name and page of the flow run; empty outside of a flow."""
    if not in_flow():
        return {}
    from prefect.runtime import flow_run

    links = {
        "prefect_flow_run_id": flow_run.id,
        "prefect_flow_run_name": flow_run.name,
        "prefect_flow_run_url": flow_run.ui_url,
    }
    # A temporary server has no pages to link to, and Prefect writes their missing address as "None".
    return {name: text for name, text in links.items() if text and not text.startswith("None/")}
