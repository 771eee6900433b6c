"""`virnuc track`: completes what MLflow lacks."""

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, command
from virnuc_core.errors import InputError, VirnucError


@command(cli, click.Argument(["runs"], nargs=-1, required=True, metavar="RUN..."))
def track(runs: tuple[str, ...]) -> Answer:
    """Logs finished runs in MLflow, or completes what it has of them, as when it was away at their end.

    RUN is the --out of a run.
    """
    from tasks.run_entries import entries_of
    from tasks.tracking import Store
    from virnuc_core.remote import output_path

    entries = []
    for run in runs:
        found = entries_of(output_path(run))
        if not found:
            raise InputError(f"{run} holds no finished run: give the --out of one.")
        entries += found
    store, failures = Store(), list[VirnucError]()
    store.connection()
    for entry in entries:
        try:
            store.write(entry)
        except VirnucError as error:  # MLflow may refuse one of them
            failures.append(error)
    if failures:
        raise failures[0]
    return Answer({"logged": [entry.name for entry in entries]}, f"logged in MLflow: {len(entries)} runs")
