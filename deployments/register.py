"""Registers work pools, deployments and automations at a Prefect server; idempotent.

`virnuc server deploy`, which `python -m deployments.register` starts. The definitions are in prefect.yaml and
automations.yaml. Unlike `prefect deploy --all`, it keeps changes made on the server (parameters, a paused or changed
schedule, the limit of a pool) unless they are overridden here; it drops parameters that a flow no longer has.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from deployments.alarms import (
    NOBODY,
    keep_done_by,
    notification_block,
    notified_block,
    wanted_automations,
    windows,
)
from deployments.pools import POOL_TYPES, PoolChoice
from deployments.server import POOLS, server_failure, server_url
from virnuc_core import __version__
from virnuc_core.errors import UsageError, VirnucError

PREFECT_FILE: Final = Path(__file__).with_name("prefect.yaml")
NIGHTLY: Final = "nightly/nightly"
# Of servers that an earlier version was deployed to: after a pause of the server it crashes runs that are alive.
_REPLACED_AUTOMATION: Final = "virnuc: runs without a heartbeat have crashed"
# Settings of the nightly run that belong together, or exclude each other: naming one of them resets the others.
MODEL_SETTINGS: Final = ("preset", "chunk_length", "esm_model", "dnabert_model", "head")
_CALL_SETTINGS: Final = ("threshold", "fdr")

_AS_THEY_ARE: Final = PoolChoice()


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyChoice:
    """Requested changes to the nightly run; None keeps the current value.

    Attributes:
        cron: five fields.
        timezone: IANA name of the time zone of `cron`.
        inbox: folder or glob of sequence files.
        settings: validated settings of its runs; any of `MODEL_SETTINGS` replaces all of them that the deployment had, and a
            threshold replaces an FDR.
        batch: its other parameters.
        done_by: time of day, "08:00", at which it is late.
        notify: block TYPE/NAME for alarms, or "none".
    """

    cron: str | None = None
    timezone: str | None = None
    inbox: str | None = None
    out: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    done_by: str | None = None
    notify: str | None = None

    @property
    def begins(self) -> bool:
        """Whether a paused schedule is to be active again."""
        return any((self.cron, self.timezone, self.inbox, self.out))


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """An object on the server, created or updated."""

    kind: str
    name: str
    is_new: bool
    note: str = ""

    @property
    def line(self) -> str:
        """One line of text for the terminal."""
        note = f" ({self.note})" if self.note else ""
        return f"{'made' if self.is_new else 'updated'} {self.kind} {self.name}{note}"


def register(
    nightly: NightlyChoice, pools: PoolChoice = _AS_THEY_ARE, wait_timeout: float = 0.0
) -> list[Registered]:
    """Creates or updates everything on the server of Prefect's settings; waits up to `wait_timeout` seconds for it.

    Raises:
        UsageError: no server is configured, it does not answer, or the schedule is invalid.
        VirnucError: the server refuses something.
    """
    url = server_url()
    deployments = yaml.safe_load(PREFECT_FILE.read_text())["deployments"]
    _await_server(url, wait_timeout)
    with get_client(sync_client=True) as client:
        try:
            return [
                *(_register_pool(client, name, pools) for name in POOLS),
                *(_register_queue(client, name, queue) for name in POOLS for queue in POOLS[name].queues),
                *(_register_deployment(client, item, nightly) for item in deployments),
                *_register_automations(client, nightly),
            ]
        except PrefectHTTPStatusError as error:
            raise VirnucError(f"the Prefect server at {url} refuses: {error}") from error


def deployed_nightly() -> dict[str, Any]:
    """The nightly run as it is deployed: version, schedule, deadline, who is notified, and parameters.

    Raises:
        UsageError: no server is configured, it does not answer, or nothing is deployed there.
    """
    url = server_url()
    _await_server(url, 0.0)
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(NIGHTLY)
        except ObjectNotFound as error:
            raise UsageError(
                f"the Prefect server at {url} has no {NIGHTLY}: run `virnuc server deploy`."
            ) from error
        times = [
            f"{current.schedule.cron} {current.schedule.timezone}{'' if current.active else ', paused'}"
            for current in deployment.schedules
            if isinstance(current.schedule, CronSchedule)
        ]
        return {
            "version": deployment.version,
            "schedule": "; ".join(times),
            "done_by": keep_done_by(None),
            "notify": notified_block(client),
            **deployment.parameters,
        }


def _await_server(url: str, wait_timeout: float) -> None:
    deadline = time.monotonic() + wait_timeout
    while (failure := server_failure()) is not None:
        if time.monotonic() > deadline:
            raise UsageError(
                f"the Prefect server at {url} does not answer ({failure}): start it with `virnuc server up` or "
                "`prefect server start`, or name another one in PREFECT_API_URL."
            )
        time.sleep(0.2)


def _register_pool(client: SyncPrefectClient, name: str, choice: PoolChoice) -> Registered:
    try:
        pool, is_new = client.read_work_pool(name), False
    except ObjectNotFound:
        wanted = WorkPoolCreate(
            name=name,
            type=choice.type or "process",
            description=POOLS[name].description,
            base_job_template=choice.template(name, None),
            concurrency_limit=POOLS[name].limit,
        )
        pool, is_new = client.create_work_pool(wanted), True
    possible = (choice.type,) if choice.type else POOL_TYPES
    if pool.type not in possible:
        raise UsageError(
            f"the work pool {name} at the server is of type {pool.type!r}, and not {' or '.join(possible)}: delete it "
            f"with `prefect work-pool delete {name}`, and run this again."
        )
    if not is_new and choice.job_variables:
        template = choice.template(name, pool.base_job_template)
        client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    return Registered(kind="work pool", name=name, is_new=is_new, note=pool.type)


def _register_queue(client: SyncPrefectClient, pool: str, name: str) -> Registered:
    """Before those of lower priority, and the pool's default queue."""
    try:
        client.read_work_queue_by_name(name, work_pool_name=pool)
        is_new = False
    except ObjectNotFound:
        priority, limit = list(POOLS[pool].queues).index(name) + 1, POOLS[pool].queues[name]
        client.create_work_queue(name, work_pool_name=pool, priority=priority, concurrency_limit=limit)
        is_new = True
    return Registered(kind="work queue", name=f"{pool}/{name}", is_new=is_new)


def _register_deployment(
    client: SyncPrefectClient, item: Mapping[str, Any], nightly: NightlyChoice
) -> Registered:
    """An update keeps the deployment's id, and with it its page and its runs."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(item["entrypoint"])
    name = f"{flow.name}/{item['name']}"
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        existing = None
    stored, dropped = _known_parameters(flow, existing.parameters if existing else {})
    parameters = {**item.get("parameters", {}), **stored}
    schedules = _schedules(item, existing)
    notes = [f"pool {item['work_pool']['name']}"]
    if name == NIGHTLY:
        folders = {"inbox": nightly.inbox, "out": nightly.out}
        parameters |= {key: str(Path(value).absolute()) for key, value in folders.items() if value}
        has_folders = all(parameters.get(key) for key in folders)
        schedule, when = _schedule(item["schedules"][0], existing, nightly, has_folders=has_folders)
        schedules = [schedule]
        settings = dict(parameters.get("settings", {}))
        for group in (MODEL_SETTINGS, _CALL_SETTINGS):
            if set(group) & set(nightly.settings):
                settings = {key: value for key, value in settings.items() if key not in group}
        parameters |= {**nightly.batch, "settings": {**settings, **nightly.settings}}
        notes += [when, *_in_words(parameters)]
    if dropped:
        notes.append(f"without {' and '.join(dropped)}, which {flow.name} no longer has")
    client.create_deployment(
        flow_id=client.create_flow_from_name(flow.name),
        name=item["name"],
        entrypoint=item["entrypoint"],
        version=__version__,
        pull_steps=[],
        parameters=parameters,
        # Without additionalProperties, an unknown parameter would be refused only by the run.
        parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True)
        | {"additionalProperties": False},
        enforce_parameter_schema=True,
        schedules=schedules,
        tags=item["tags"],
        description=item["description"],
        work_pool_name=item["work_pool"]["name"],
        work_queue_name=item["work_pool"]["work_queue_name"],
        job_variables=item["work_pool"]["job_variables"],
    )
    return Registered(kind="deployment", name=name, is_new=existing is None, note=", ".join(notes))


def _known_parameters(flow: Flow[..., Any], stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Stored parameters that the flow has, and the names of the others: an update of virnuc may have renamed them."""
    hints = get_type_hints(flow.fn)
    known: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in stored.items():
        fields = getattr(hints.get(name), "model_fields", None)
        if name not in hints:
            dropped.append(name)
        elif fields is None or not isinstance(value, dict):
            known[name] = value
        else:
            known[name] = {key: inner for key, inner in value.items() if key in fields}
            dropped += [f"{name}.{key}" for key in value if key not in fields]
    return known, dropped


def _in_words(parameters: Mapping[str, Any]) -> list[str]:
    """Models and other choices of the nightly run."""
    settings = parameters.get("settings", {})
    chosen = [key for key in MODEL_SETTINGS if settings.get(key) is not None]
    models = [f"{key} {settings[key]}" for key in chosen]
    default = "the small bundled models (--preset, --esm-model, --head choose others)"
    others = {**{key: value for key, value in settings.items() if key not in chosen}, **parameters}
    shown = [
        f"{key} {','.join(value) if isinstance(value, tuple | list) else value}"
        for key, value in others.items()
        if value is not None and key not in ("inbox", "out", "mode", "settings")
    ]
    return [*(models or [default]), *shown]


def _schedules(
    item: Mapping[str, Any], existing: DeploymentResponse | None
) -> list[DeploymentScheduleCreate]:
    """Those on the server, at first those of prefect.yaml."""
    if existing is None:
        return [
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=one["cron"], timezone=one["timezone"]),
                active=one["active"],
                slug=one["slug"],
            )
            for one in item.get("schedules", ())
        ]
    return [
        DeploymentScheduleCreate(schedule=one.schedule, active=one.active, slug=one.slug)
        for one in existing.schedules
    ]


def _schedule(
    item: Mapping[str, Any],
    existing: DeploymentResponse | None,
    nightly: NightlyChoice,
    *,
    has_folders: bool,
) -> tuple[DeploymentScheduleCreate, str]:
    """The schedule requested here, else the one on the server, else that of prefect.yaml; and its description.

    A nightly run without folders could only fail, so its schedule stays inactive until they are set.
    """
    cron, timezone, was_active = item["cron"], item["timezone"], has_folders
    for current in existing.schedules if existing else ():
        if existing and isinstance(current.schedule, CronSchedule):
            cron, timezone = current.schedule.cron, current.schedule.timezone
            # Paused by a person, or inactive since there was no inbox yet.
            was_active = current.active or not {"inbox", "out"} <= set(existing.parameters)
    is_active = has_folders and (was_active or nightly.begins)
    try:
        chosen = CronSchedule(cron=nightly.cron or cron, timezone=nightly.timezone or timezone)
    except ValidationError as error:
        faults = "; ".join(f"--{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        raise UsageError(
            f"this schedule cannot be used: {faults}. Give five fields such as '0 2 * * *', and a time zone such "
            "as Europe/Berlin."
        ) from error
    state = "" if is_active else ", paused" if has_folders else ", resting until --inbox and --out are given"
    schedule = DeploymentScheduleCreate(schedule=chosen, active=is_active, slug=item["slug"])
    return schedule, f"{chosen.cron} {chosen.timezone}{state}"


def _register_automations(client: SyncPrefectClient, nightly: NightlyChoice) -> Iterator[Registered]:
    deployment = client.read_deployment_by_name(NIGHTLY)
    [current] = deployment.schedules
    done_by = keep_done_by(nightly.done_by)
    assert isinstance(current.schedule, CronSchedule)
    # Without folders there is no night that could be late.
    times = windows(current.schedule, done_by) if {"inbox", "out"} <= set(deployment.parameters) else {}
    notify = nightly.notify is not None
    block = notification_block(client, nightly.notify) if nightly.notify not in (None, NOBODY) else None
    existing = {found.name: found for found in client.read_automations()}
    if (replaced := existing.get(_REPLACED_AUTOMATION)) is not None:
        client.delete_automation(replaced.id)
    for wanted in wanted_automations(times, list(existing.values()), block, notify=notify):
        before = existing.get(wanted.name)
        if before is None:
            client.create_automation(wanted)
        elif AutomationCore.model_validate(before.model_dump(exclude={"id"})) != wanted:
            # An update forgets which runs are waited for.
            client.update_automation(before.id, wanted)
        assert isinstance(wanted.trigger, EventTrigger)
        is_alarm = any(action.type == "send-notification" for action in wanted.actions)
        note = f"within {wanted.trigger.within}{', notifies' if is_alarm else ''}"
        yield Registered(kind="automation", name=wanted.name, is_new=before is None, note=note)


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-P", "-m", "virnuc_cli", "server", "deploy", *sys.argv[1:]])  # noqa: S606 (the same process goes on as the command)
