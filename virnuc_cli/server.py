"""`virnuc server`: commands for operators of a Prefect server and its hosts."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, CommandGroup, command
from virnuc_core.errors import InputError, VirnucError

if TYPE_CHECKING:
    from deployments.deploy import PoolType

_WORKERS: Final = (
    click.Option(
        ["--devices"],
        default="auto",
        metavar="auto|cpu|none|0,1,...",
        help="GPUs to compute on; cpu: the CPU instead; none: whole runs only [auto].",
    ),
    click.Option(["--workers"], type=int, metavar="N", help="Concurrent lanes on the CPU [1]."),
)
_FOLDER: Final = click.Argument(
    ["folder"], required=False, type=click.Path(path_type=Path, resolve_path=True), metavar="[FOLDER]"
)


@cli.group(cls=CommandGroup)
def server() -> None:
    """Start servers and workers, and register the nightly batch."""


@command(
    server,
    *_WORKERS,
    click.Option(["--runs"], type=int, default=4, metavar="N", help="Concurrent whole runs; 0 for none [4]."),
    answers=False,
)
def worker(devices: str, workers: int | None, runs: int) -> None:
    """Run the workers of this host for the Prefect server, one per GPU, until stopped."""
    from deployments.prefect_settings import logging_programs, prepare_prefect
    from deployments.worker import WorkerChoice, work

    prepare_prefect()
    with logging_programs():
        work(WorkerChoice(devices=devices, workers=workers, runs=runs))


@command(
    server,
    _FOLDER,
    *_WORKERS,
    click.Option(
        ["--port"], type=int, default=4200, metavar="PORT", help="Port of the Prefect server [4200]."
    ),
    click.Option(
        ["--mlflow-port"], type=int, default=5000, metavar="PORT", help="Port of the MLflow server [5000]."
    ),
    answers=False,
)
def up(folder: Path | None, devices: str, workers: int | None, port: int, mlflow_port: int) -> None:
    """Start a Prefect server, MLflow and workers on this machine until Ctrl-C.

    FOLDER is the folder used with `virnuc server deploy`.
    """
    from deployments.prefect_settings import logging_programs, prepare_prefect
    from deployments.up import run_stack
    from deployments.worker import WorkerChoice
    from virnuc_core.env_config import home_folder

    prepare_prefect()
    with logging_programs():
        choice = WorkerChoice(devices=devices, workers=workers)
        run_stack(port, mlflow_port, choice, home_folder("up").resolve().parent, folder)


@command(
    server,
    _FOLDER,
    click.Option(
        ["--pool-type"],
        type=click.Choice(["process", "kubernetes"]),
        help="Start runs as processes of the worker's host or as Kubernetes Jobs [unchanged; process for new pools].",
    ),
)
def deploy(folder: Path | None, pool_type: "PoolType | None") -> Answer:
    """Create or update work pools, deployments and automations on the Prefect server.

    FOLDER holds the site's own prefect.yaml, with the nightly batch, and alarms.yaml. A new FOLDER gets copies to edit.
    """
    from deployments.prefect_settings import prepare_prefect

    prepare_prefect()
    from deployments.deploy import deploy  # imports Prefect

    done = deploy(folder, pool_type)
    return Answer({"deployed": done}, "\n".join(done))


@command(server, click.Argument(["runs"], nargs=-1, required=True, metavar="RUN..."))
def track(runs: tuple[str, ...]) -> Answer:
    """Log finished runs in MLflow, or add records missed while MLflow was down.

    RUN is the --out of a run.
    """
    from tasks.run_entries import entries_of
    from tasks.tracking import connect, write
    from virnuc_core.remote import output_path

    entries = []
    for run in runs:
        found = entries_of(output_path(run))
        if not found:
            raise InputError(f"{run} contains no finished run: give the --out of one.")
        entries += found
    connection, failures = connect(), list[VirnucError]()
    for entry in entries:
        try:
            write(*connection, entry)
        except VirnucError as error:  # MLflow may refuse one of them
            failures.append(error)
    if failures:
        raise failures[0]
    return Answer({"logged": [entry.name for entry in entries]}, f"{len(entries)} runs logged in MLflow")
