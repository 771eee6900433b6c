"""`virnuc server`: what operators start on a Prefect server and its hosts."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, CommandGroup, command
from virnuc_core.errors import InputError, VirnucError

if TYPE_CHECKING:
    from deployments.pools import PoolType
    from virnuc_core.settings import NightlySettings

_WORKERS: Final = (
    click.Option(
        ["--devices"],
        default="auto",
        metavar="auto|cpu|none|0,1,...",
        help="GPUs that compute lanes; cpu for the CPU instead, none for whole runs alone [auto].",
    ),
    click.Option(["--workers"], type=int, metavar="N", help="Lanes at once on the CPU [1]."),
)


@cli.group(cls=CommandGroup)
def server() -> None:
    """Starts servers and workers, and registers the nightly batch."""


@command(
    server,
    *_WORKERS,
    click.Option(
        ["--runs"], type=int, default=4, metavar="N", help="Whole runs to look after at once; 0 for none [4]."
    ),
    answers=False,
)
def worker(devices: str, workers: int | None, runs: int) -> None:
    """Works for the Prefect server until it is stopped, with a slot for each GPU of this host."""
    from deployments.prefect_settings import logging_programs, prepare_prefect
    from deployments.worker import WorkerChoice, work

    prepare_prefect()
    with logging_programs():
        work(WorkerChoice(devices=devices, workers=workers, runs=runs))


@command(
    server,
    *_WORKERS,
    click.Option(
        ["--port"], type=int, default=4200, metavar="PORT", help="Port of the Prefect server [4200]."
    ),
    click.Option(
        ["--mlflow-port"], type=int, default=5000, metavar="PORT", help="Port of the MLflow server [5000]."
    ),
    answers=False,
)
def up(devices: str, workers: int | None, port: int, mlflow_port: int) -> None:
    """Starts a Prefect server, MLflow and workers on this machine, until Ctrl-C."""
    from deployments.prefect_settings import logging_programs, prepare_prefect
    from deployments.up import Stack, run_stack
    from deployments.worker import WorkerChoice
    from virnuc_core.env_config import home_folder

    prepare_prefect()
    choice = WorkerChoice(devices=devices, workers=workers)
    with logging_programs():
        run_stack(
            Stack(port=port, mlflow_port=mlflow_port, workers=choice, folder=home_folder("up").resolve())
        )


@command(
    server,
    click.Option(["--cron"], metavar="CRON", help='When the nightly batch begins ["0 2 * * *"].'),
    click.Option(["--timezone"], metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin [UTC]."),
    click.Option(["--inbox"], metavar="DIR|GLOB", help="Where the nightly batch finds files."),
    click.Option(["-o", "--out"], metavar="DIR", help="Where the nightly batch puts its runs."),
    click.Option(
        ["--done-by"],
        metavar="HH:MM",
        help="When a nightly batch that is not done raises an alarm, in the time zone of --cron [when the next begins].",
    ),
    click.Option(
        ["--notify"],
        metavar="TYPE/NAME",
        help="Notification block of the Prefect server for alarms, such as slack-webhook/ops; made if VIRNUC_NOTIFY_URL "
        "is set to its address. none: alarms are only events [as deployed].",
    ),
    click.Option(
        ["--pool-type"],
        type=click.Choice(["process", "kubernetes"]),
        help="How workers start runs: as processes of their host, or as Jobs of a cluster [as it is; at first process].",
    ),
    click.Option(
        ["--job-variable"],
        multiple=True,
        metavar="[POOL.]NAME=VALUE...",
        help="How runs are started in all work pools or in one, such as image=registry/virnuc:1 or virnuc-gpu.gpus=2.",
    ),
    click.Option(
        ["--show"],
        is_flag=True,
        help="Show the nightly batch that is deployed, and change nothing.",
    ),
    settings="NightlySettings",
)
def deploy(
    settings: "NightlySettings",
    pool_type: "PoolType | None",
    job_variable: tuple[str, ...],
    show: bool,
    **choice: str | None,
) -> Answer:
    """Makes work pools, deployments, the nightly schedule and alarms on the Prefect server; may be run again."""
    from deployments.prefect_settings import prepare_prefect
    from flows.outputs import absolute_path
    from virnuc_cli.preflight import require_models_and_head
    from virnuc_core.settings import BatchSettings, PredictSettings

    chosen = settings.given_of(PredictSettings)
    if chosen:  # fails now instead of at night
        asked = PredictSettings(**chosen)
        if "head" not in chosen:  # --fdr is for the deployed one, which only the server knows
            asked = asked.model_copy(update={"fdr": None})
        require_models_and_head(asked)
    for name in {"esm_model", "dnabert_model", "head"} & {*chosen}:
        chosen[name] = absolute_path(chosen[name])
    prepare_prefect()
    from deployments.pools import PoolChoice
    from deployments.register import NightlyChoice, deployed_nightly, register  # imports Prefect

    if show:
        deployed = deployed_nightly()
        return Answer(deployed, "\n".join(f"{name:9} {value}" for name, value in deployed.items()))
    nightly = NightlyChoice(**choice, settings=chosen, batch=settings.given_of(BatchSettings))
    done = register(nightly, PoolChoice(type=pool_type, job_variables=job_variable))
    return Answer({"registered": [asdict(item) for item in done]}, "\n".join(item.line for item in done))


@command(server, click.Argument(["runs"], nargs=-1, required=True, metavar="RUN..."))
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
