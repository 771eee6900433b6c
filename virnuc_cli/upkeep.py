"""`virnuc track`: completes what MLflow lacks."""

from pathlib import Path

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, command
from virnuc_core.errors import InputError


@command(cli, click.Argument(["runs"], nargs=-1, metavar="[RUN]..."))
def track(runs: tuple[str, ...]) -> Answer:
    """Records in MLflow what could not be recorded when it was away, and ends the records of killed runs.

    RUN is the --out of a run; without any, all runs of this VIRNUC_HOME are completed. The next run does the same.
    """
    from tasks.run_record import complete_records  # imports httpx
    from virnuc_core.env_config import env
    from virnuc_core.remote import output_path
    from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder

    folders = [env().home / "tracking"]
    if runs:
        found = [Path(f"{output_path(run)}{suffix}") for run in runs for suffix in ("", EMBED_SUFFIX)]
        folders = [RunFolder(folder).tracking for folder in found if folder.is_dir()]
        if not folders:
            raise InputError(f"{', '.join(runs)} is no folder of a run. Give the --out of a run.")
    completed, left = complete_records(folders)
    more = f"; {left} left, of runs at work or for another MLFLOW_TRACKING_URI" if left else ""
    return Answer({"completed": completed, "left": left}, f"{completed} records completed in MLflow{more}")
