"""What `virnuc deploy`, `virnuc worker` and `virnuc up` do; imported when one of them runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from deployments.register import NightlyChoice, register
from deployments.up import Stack, run_stack
from deployments.worker import WorkerChoice, work
from flows.outputs import absolute_path
from virnuc_cli.local_prefect import prepare_local_prefect
from virnuc_cli.preflight import require_models_and_head
from virnuc_cli.terminal import OutputMode, show
from virnuc_core.env_config import env
from virnuc_core.settings import PredictSettings, predict_config, read_settings


def run_deploy(
    *,
    cron: str | None,
    timezone: str | None,
    inbox: str | None,
    out: str | None,
    output: OutputMode,
    **models: Any,
) -> None:
    """`virnuc deploy`; models that cannot be used at night are refused now."""
    given = {name: value for name, value in models.items() if value is not None}
    if given:
        require_models_and_head(predict_config(read_settings(PredictSettings, given)))
    named = ("esm_model", "dnabert_model", "head", "dna_head")
    paths = {name: absolute_path(given[name]) for name in named if name in given}
    prepare_local_prefect()
    done = register(
        NightlyChoice(cron=cron, timezone=timezone, inbox=inbox, out=out, models={**given, **paths})
    )
    show(output, {"registered": [asdict(item) for item in done]}, "\n".join(item.line for item in done))


def run_worker(*, devices: str, workers: int | None, runs: int) -> None:
    """`virnuc worker`; a signal is how it ends."""
    prepare_local_prefect()
    with _log_programs(), suppress(KeyboardInterrupt):
        work(WorkerChoice(devices=devices, workers=workers, runs=runs))


def run_up(*, port: int, mlflow_port: int, devices: str, workers: int | None) -> None:
    """`virnuc up`; a signal is how it ends."""
    prepare_local_prefect()
    stack = Stack(
        port=port,
        mlflow_port=mlflow_port,
        workers=WorkerChoice(devices=devices, workers=workers),
        folder=env().home.resolve() / "up",
    )
    with _log_programs(), suppress(KeyboardInterrupt):
        run_stack(stack)


@contextmanager
def _log_programs() -> Iterator[None]:
    """Says on stderr which programs start and end."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("virnuc: %(message)s"))
    logger = logging.getLogger("deployments")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # to Prefect's handler, which would print the line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
