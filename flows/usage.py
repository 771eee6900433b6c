"""The usage flow: GPU hours and cost of a month as a table in Prefect."""

from prefect import flow

from tasks.artifacts import show_table
from tasks.usage import Month, last_month, usage_of


@flow(name="report-usage", persist_result=False)
def report_usage(month: Month | None = None) -> None:
    """Shows GPU hours and cost by project.

    Args:
        month: such as 2026-11; the last one by default.
    """
    month = month or last_month()
    show_table("virnuc-usage", [usage.row for usage in usage_of(month)], f"GPU hours by project, {month}")
