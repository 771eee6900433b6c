"""`virnuc usage`: what runs have cost."""

from dataclasses import asdict

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, command


@command(
    cli, click.Option(["--month"], metavar="YYYY-MM", help="Month in which the runs began (UTC) [this one].")
)
def usage(month: str | None) -> Answer:
    """Sums GPU hours and cost by project, from MLflow's record of the runs (--project, VIRNUC_GPU_HOUR_PRICE)."""
    from datetime import UTC, datetime

    from tasks.usage import usage_of
    from virnuc_cli.local_prefect import prepare_local_prefect
    from virnuc_cli.terminal import aligned  # imports rich

    month = month or f"{datetime.now(UTC):%Y-%m}"
    prepare_local_prefect()
    found = usage_of(month)
    rows = [list(map(str, one.row.values())) for one in found]
    table = aligned([["project", "runs", "GPU hours", "cost"], *rows], numbers=(1, 2, 3))
    return Answer(
        {"month": month, "projects": [asdict(one) for one in found]}, table if rows else f"no runs in {month}"
    )
