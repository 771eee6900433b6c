"""Makes work pools, deployments and the watch for dead runs at a Prefect server; may be run again at any time.

`virnuc deploy`, which `python -m deployments.register` starts. prefect.yaml says what there is. Whatever a person has set at the
server since (parameters, a schedule that was paused or moved, the limit of a pool) stays as it is, unless it is
asked for here.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from deployments.server import GPU_POOL, PLAN_QUEUE, POOLS, server_failure, server_url
from virnuc_core.errors import UsageError, VirnucError

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.events.schemas.automations import AutomationCore

PREFECT_FILE: Final = Path(__file__).with_name("prefect.yaml")
NIGHTLY: Final = "predict/nightly"
# What `virnuc deploy` can set of the settings of the nightly batch.
MODEL_SETTINGS: Final = ("preset", "chunk_length", "esm_model", "dnabert_model", "head", "dna_head")
AUTOMATION: Final = "virnuc: runs without a heartbeat have crashed"
# More than three heartbeats of prefect.yaml: one or two may be lost, as when the server is started again.
HEARTBEAT_TIMEOUT: Final = timedelta(seconds=200)


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyChoice:
    """What is asked for of the nightly batch; None leaves what is there.

    Attributes:
        cron: when it starts, in five fields.
        timezone: IANA name of the time zone that `cron` is in.
        inbox: folder or glob of sequence files.
        out: folder for the results.
        models: settings of `MODEL_SETTINGS`, checked; any of them replaces all that the deployment had.
    """

    cron: str | None = None
    timezone: str | None = None
    inbox: str | None = None
    out: str | None = None
    models: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """One thing at the server, whether it was made or was there already, and what to know of it."""

    kind: str
    name: str
    is_new: bool
    note: str = ""

    @property
    def line(self) -> str:
        """The same for a person."""
        note = f" ({self.note})" if self.note else ""
        return f"{'made' if self.is_new else 'updated'} {self.kind} {self.name}{note}"


def register(
    nightly: NightlyChoice, prefect_file: Path = PREFECT_FILE, patience: float = 0.0
) -> list[Registered]:
    """Makes or updates everything that `prefect_file` names, at the server of Prefect's settings.

    Args:
        nightly: what is asked for of the nightly batch.
        prefect_file: the deployments.
        patience: seconds to wait for a server that does not answer yet.

    Raises:
        UsageError: no server is named, it does not answer, or the schedule cannot be used.
        VirnucError: the server refuses something.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    url = server_url()
    items: list[dict[str, Any]] = yaml.safe_load(prefect_file.read_text())["deployments"]
    _await_server(url, patience)
    with get_client(sync_client=True) as client:
        try:
            done = [_make_pool(client, name) for name in POOLS]
            done.append(_make_plan_queue(client))
            done += [_make_deployment(client, item, nightly) for item in items]
            done.append(_make_automation(client))
        except PrefectHTTPStatusError as error:
            raise VirnucError(f"the Prefect server at {url} refuses: {error}") from error
    return done


def _await_server(url: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while (failure := server_failure()) is not None:
        if time.monotonic() > deadline:
            raise UsageError(
                f"the Prefect server at {url} does not answer ({failure}): start it with `virnuc up` or "
                "`prefect server start`, or name another one in PREFECT_API_URL."
            )
        time.sleep(0.2)


def _make_pool(client: "SyncPrefectClient", name: str) -> Registered:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        description, limit = POOLS[name]
        template = ProcessWorker.get_default_base_job_template()
        wanted = WorkPoolCreate(
            name=name,
            type="process",
            description=description,
            base_job_template=template,
            concurrency_limit=limit,
        )
        pool, is_new = client.create_work_pool(wanted), True
    else:
        is_new = False
    if pool.type != "process":
        raise UsageError(
            f"the work pool {name} at the server is of type {pool.type!r} and virnuc needs one of type 'process': "
            f"delete it with `prefect work-pool delete {name}`, and run this again."
        )
    return Registered(kind="work pool", name=name, is_new=is_new)


def _make_plan_queue(client: "SyncPrefectClient") -> Registered:
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_work_queue_by_name(PLAN_QUEUE, work_pool_name=GPU_POOL)
        is_new = False
    except ObjectNotFound:
        client.create_work_queue(PLAN_QUEUE, work_pool_name=GPU_POOL, priority=1)
        is_new = True
    return Registered(kind="work queue", name=f"{GPU_POOL}/{PLAN_QUEUE}", is_new=is_new)


def _make_deployment(
    client: "SyncPrefectClient", item: Mapping[str, Any], nightly: NightlyChoice
) -> Registered:
    """Writes one deployment of prefect.yaml; an update keeps its id, and with it its page and its runs."""
    from prefect.exceptions import ObjectNotFound
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow: Flow[..., Any] = load_flow_from_entrypoint(item["entrypoint"])
    name = f"{flow.name}/{item['name']}"
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        existing = None
    parameters = {**item.get("parameters", {}), **(existing.parameters if existing else {})}
    schedules: list[DeploymentScheduleCreate] = []
    note = f"pool {item['work_pool']['name']}"
    if name == NIGHTLY:
        chosen = {"inbox": nightly.inbox, "out": nightly.out}
        parameters |= {key: str(Path(value).absolute()) for key, value in chosen.items() if value}
        is_ready = all(parameters.get(key) for key in chosen)
        schedules, when = _schedules(item["schedules"][0], existing, nightly, is_ready=is_ready)
        parameters |= {"settings": settings} if (settings := _settings(parameters, nightly)) else {}
        note = f"{note}, {when}, {_models_in_words(settings)}"
    client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=item["name"],
        entrypoint=item["entrypoint"],
        pull_steps=[],
        parameters=parameters,
        # Without the latter, a parameter that does not exist would be refused only by the run.
        parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True)
        | {"additionalProperties": False},
        enforce_parameter_schema=True,
        schedules=schedules,
        tags=item["tags"],
        description=item["description"],
        work_pool_name=item["work_pool"]["name"],
        work_queue_name=item["work_pool"].get("work_queue_name"),
        job_variables=item["work_pool"]["job_variables"],
    )
    return Registered(kind="deployment", name=name, is_new=existing is None, note=note)


def _settings(parameters: Mapping[str, Any], nightly: NightlyChoice) -> dict[str, Any]:
    """The settings of the nightly batch: with the models that are asked for here, else as they are at the server."""
    there: dict[str, Any] = parameters.get("settings", {})
    if not nightly.models:
        return there
    return {name: value for name, value in there.items() if name not in MODEL_SETTINGS} | {**nightly.models}


def _models_in_words(settings: Mapping[str, Any]) -> str:
    chosen = [f"{name} {settings[name]}" for name in MODEL_SETTINGS if settings.get(name) is not None]
    return ", ".join(chosen) or "the small bundled models (--preset, --esm-model, --head choose others)"


def _schedules(
    item: Mapping[str, Any],
    existing: "DeploymentResponse | None",
    nightly: NightlyChoice,
    *,
    is_ready: bool,
) -> "tuple[list[DeploymentScheduleCreate], str]":
    """The schedule as asked for here, else as it is at the server, else as in prefect.yaml; and in words.

    Without a folder to look in, a nightly run could only fail, so the schedule rests until there is one.
    """
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    cron, timezone, was_active = item["cron"], item["timezone"], is_ready
    for schedule in existing.schedules if existing else ():
        if isinstance(schedule.schedule, CronSchedule):
            cron, timezone = schedule.schedule.cron, schedule.schedule.timezone
            # Paused by a person, or resting since there was no inbox yet.
            had_folders = existing is not None and {"inbox", "out"} <= set(existing.parameters)
            was_active = schedule.active or not had_folders
    is_active = is_ready and (was_active or replace(nightly, models={}) != NightlyChoice())
    try:
        chosen = CronSchedule(cron=nightly.cron or cron, timezone=nightly.timezone or timezone)
    except ValidationError as error:
        faults = "; ".join(f"--{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise UsageError(
            f"this schedule cannot be used: {faults}. Give five fields such as '0 2 * * *', and a time zone such "
            "as Europe/Berlin."
        ) from error
    words = f"{chosen.cron} {chosen.timezone}"
    if not is_ready:
        words += ", resting until --inbox and --out are given"
    elif not is_active:
        words += ", paused"
    return [DeploymentScheduleCreate(schedule=chosen, active=is_active, slug=item["slug"])], words


def _make_automation(client: "SyncPrefectClient") -> Registered:
    wanted = _zombie_automation()
    existing = client.read_automations_by_name(AUTOMATION)
    if existing:
        wanted.enabled = existing[0].enabled
        client.update_automation(existing[0].id, wanted)
    else:
        client.create_automation(wanted)
    note = f"after {HEARTBEAT_TIMEOUT.total_seconds():.0f} s"
    return Registered(kind="automation", name=AUTOMATION, is_new=not existing, note=note)


def _zombie_automation() -> "AutomationCore":
    """Sets runs of these deployments to Crashed when nothing was heard of them for some time.

    A worker does this within seconds for a run whose process died; this is for a run that died together with its
    worker or its host.
    """
    from prefect.events.schemas.automations import AutomationCore

    seconds = HEARTBEAT_TIMEOUT.total_seconds()
    return AutomationCore.model_validate(
        {
            "name": AUTOMATION,
            "description": "A run that died together with its worker would stay Running for ever.",
            "trigger": {
                "type": "event",
                "posture": "Proactive",
                "after": ["prefect.flow-run.heartbeat"],
                "expect": ["prefect.flow-run.*"],
                "match": {"prefect.resource.id": "prefect.flow-run.*"},
                "match_related": {"prefect.resource.id": "prefect.tag.virnuc"},
                "for_each": ["prefect.resource.id"],
                "threshold": 1,
                "within": seconds,
            },
            "actions": [
                {
                    "type": "change-flow-run-state",
                    "state": "CRASHED",
                    "message": f"No heartbeat for {seconds:.0f} s.",
                }
            ],
        }
    )


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "virnuc_cli", "deploy", *sys.argv[1:]])  # noqa: S606 (the same process goes on as the command)
