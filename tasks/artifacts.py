"""The only door to Prefect's artifacts: what a run shows on its page."""

from prefect.artifacts import create_table_artifact

from tasks.reporting import RunReport


def show_tables(report: RunReport) -> None:
    """Puts two tables on the page of the run: what came out, and how fast each lane was."""
    facts = {**report.figures, "results": report.out, **report.links}
    create_table_artifact(
        key="virnuc-summary",
        table=[{"what": name.replace("_", " "), "value": value} for name, value in facts.items()],
        description=" ".join(f"Note: {note}" for note in report.notes) or None,
    )
    if report.lanes:
        create_table_artifact(key="virnuc-lanes", table=report.lane_rows)
