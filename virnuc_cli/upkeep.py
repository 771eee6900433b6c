"""`virnuc usage`: what runs have cost; `virnuc track`: what MLflow does not know of them yet."""

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


@command(cli, click.Argument(["runs"], nargs=-1, metavar="[RUN]..."))
def track(runs: tuple[str, ...]) -> Answer:
    """Records in MLflow what could not be recorded when it was away, and ends the records of killed runs.

    RUN is the --out of a run; without any, all runs of this VIRNUC_HOME are completed. The next run does the same.
    """
    from pathlib import Path

    from tasks.run_record import complete_records  # imports httpx
    from virnuc_core.env_config import env
    from virnuc_core.errors import InputError
    from virnuc_core.remote import output_path
    from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder

    folders = [env().home / "tracking"]
    if runs:
        found = [Path(f"{output_path(run)}{suffix}") for run in runs for suffix in ("", EMBED_SUFFIX)]
        folders = [RunFolder(folder).tracking for folder in found if folder.is_dir()]
        if not folders:
            raise InputError(f"{', '.join(runs)} is no folder of a run. Give the --out of a run.")
    completed = complete_records(folders)
    return Answer({"completed": completed}, f"{completed} records completed in MLflow")
