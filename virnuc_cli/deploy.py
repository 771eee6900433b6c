"""`virnuc deploy`: what can be asked for from a Prefect server, and its nightly batch."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from virnuc_cli.commands import cli
from virnuc_cli.options import Answer, command

if TYPE_CHECKING:
    from deployments.pools import PoolType
    from virnuc_core.settings import NightlySettings


@command(
    cli,
    click.Option(["--cron"], metavar="CRON", help='When the nightly batch begins ["0 2 * * *"].'),
    click.Option(["--timezone"], metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin [UTC]."),
    click.Option(["--inbox"], metavar="DIR|GLOB", help="Where the nightly batch finds files."),
    click.Option(["--out"], metavar="DIR", help="Where the nightly batch puts its runs."),
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
        allow_from_autoenv=False,
        help="Show the nightly batch that is deployed, and change nothing.",
    ),
    settings="virnuc_core.settings:NightlySettings",
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
    from virnuc_cli.preflight import require_models
    from virnuc_core.models.catalogue import require_head
    from virnuc_core.settings import PredictSettings, predict_config

    chosen = settings.of_predict
    if chosen:  # fails now instead of at night
        asked = PredictSettings(**chosen)
        if "head" not in chosen:  # --fdr is for the deployed one, which only the server knows
            asked = asked.model_copy(update={"fdr": None})
        require_models(asked)
        require_head(predict_config(asked))
    for name in {"esm_model", "dnabert_model", "head"} & {*chosen}:
        chosen[name] = absolute_path(chosen[name])
    prepare_prefect()
    from deployments.pools import PoolChoice
    from deployments.register import NightlyChoice, deployed_nightly, register  # imports Prefect

    if show:
        deployed = deployed_nightly()
        return Answer(deployed, "\n".join(f"{name:9} {value}" for name, value in deployed.items()))
    nightly = NightlyChoice(**choice, settings=chosen, batch=settings.of_batch)
    done = register(nightly, PoolChoice(type=pool_type, job_variables=job_variable))
    return Answer({"registered": [asdict(item) for item in done]}, "\n".join(item.line for item in done))
