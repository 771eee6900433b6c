"""`virnuc usage`, `virnuc clean` and `virnuc track`: what runs have cost, what need not be kept, what MLflow lacks."""

import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, command
from virnuc_core.errors import InputError, UsageError, VirnucError


@command(
    cli, click.Option(["--month"], metavar="YYYY-MM", help="Month in which the runs began (UTC) [this one].")
)
def usage(month: str | None) -> Answer:
    """Sums GPU hours and cost by project, from MLflow's record of the runs (--project, VIRNUC_GPU_HOUR_PRICE)."""
    from deployments.prefect_settings import prepare_prefect
    from tasks.usage import usage_of
    from virnuc_cli.terminal import aligned  # imports rich

    month = month or f"{datetime.now(UTC):%Y-%m}"
    prepare_prefect()
    found = usage_of(month)
    rows = [list(map(str, one.row.values())) for one in found]
    table = aligned([["project", "runs", "GPU hours", "cost"], *rows], numbers=(1, 2, 3))
    return Answer(
        {"month": month, "projects": [asdict(one) for one in found]}, table if rows else f"no runs in {month}"
    )


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


@command(
    cli,
    click.Argument(["folders"], nargs=-1, metavar="[FOLDER]..."),
    click.Option(
        ["--older-than"],
        required=True,
        metavar="AGE",
        help="What was not used for that long: 12h, 90d or 8w.",
    ),
    click.Option(["--dry-run"], is_flag=True, help="Only say what would be removed."),
)
def clean(folders: tuple[str, ...], older_than: str, dry_run: bool) -> Answer:
    """Removes frames and shards of old finished runs in FOLDERs, or without any, old caches in VIRNUC_HOME.

    Results stay, and so do plans, journals and logs. Without shards, `virnuc reprocess` and `virnuc fsck` against shards
    are not possible, and the same command computes all of the run again. Runs that are unfinished or in use are kept.
    """
    from virnuc_core.results.cleaning import clean_home, clean_runs  # imports HDF5

    before = datetime.now(UTC) - _age(older_than)
    if missing := [folder for folder in folders if not Path(folder).is_dir()]:
        raise InputError(f"{missing[0]} is no folder: give run folders, or folders that hold some.")
    in_folders = (clean_runs(Path(folder), before, dry_run=dry_run) for folder in folders)
    found = list(chain(*in_folders) if folders else clean_home(before, dry_run=dry_run))
    removed = [one for one in found if not one.kept_because]
    kept = [one for one in found if one.kept_because]
    num_bytes = sum(one.num_bytes for one in removed)
    lines = [f"{'would remove' if dry_run else 'removed'} {one.line}" for one in removed]
    lines += [f"kept {one.line}" for one in kept]
    lines.append(f"{num_bytes / 1e9:.3f} GB {'would be' if dry_run else 'were'} freed")
    document = {
        "dry_run": dry_run,
        "bytes": num_bytes,
        "removed": [{"path": str(one.path), "bytes": one.num_bytes} for one in removed],
        "kept": [{"path": str(one.path), "reason": one.kept_because} for one in kept],
    }
    return Answer(document, "\n".join(lines))


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,5})([hdw])", text)
    if found is None:
        raise UsageError(f"--older-than {text} is not understood: give a number with h, d or w, such as 90d.")
    return int(found[1]) * timedelta(hours={"h": 1, "d": 24, "w": 168}[found[2]])
