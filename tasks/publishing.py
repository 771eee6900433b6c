"""Shows a finished run in Prefect."""

from pathlib import Path

from tasks.artifacts import in_flow, show_markdown, show_table
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import RunFolder


def show_run(root: Path, report: RunReport) -> None:
    """Shows a finished run on the page of its flow run, if it is one."""
    if not in_flow():
        return
    from tasks.pages.run_page import packing_rows, run_page, speed_rows, verdict

    folder = RunFolder(root)
    places = {"report": str(folder.page.resolve())} if folder.page.exists() else {}
    places["figures"] = str(folder.report.resolve())
    show_markdown("virnuc-summary", run_page(report, places), verdict(report))
    if report.lanes:
        show_table("virnuc-lanes", speed_rows(report, folder), "Where each lane worked, and how fast")
    show_table("virnuc-packing", packing_rows(report), "How full the batches of each model were")


def run_tags(out: Path, project: str = "") -> dict[str, str]:
    """Tags of an MLflow run that identify its folder, its project and its flow run."""
    return {
        "virnuc.out": str(out.resolve()),
        **({"virnuc.project": project} if project else {}),
        **flow_tags(),
    }


def flow_tags() -> dict[str, str]:
    """Id, name and page of the flow run; empty outside of a flow."""
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
