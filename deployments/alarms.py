"""The automations of automations.yaml: what the server does about lost runs, and whom it notifies of what."""

import asyncio
import copy
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

import yaml
from prefect.blocks.notifications import CustomWebhookNotificationBlock, MicrosoftTeamsWebhook, SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas.schedules import CronSchedule as DatedSchedule
from prefect.variables import Variable
from pydantic import SecretStr

from virnuc_core.env_config import env
from virnuc_core.errors import UsageError

AUTOMATIONS_FILE: Final = Path(__file__).with_name("automations.yaml")
NOTIFY_VARIABLE: Final = "VIRNUC_NOTIFY_URL"
NOBODY: Final = "none"
PREFIX: Final = "virnuc: "  # of the automations' names
# At the server, so that a new schedule keeps the deadline.
DONE_BY: Final = "virnuc_done_by"
_NUM_DATES: Final = 400  # more than a week of hourly runs


def keep_done_by(done_by: str | None) -> str | None:
    """Stores a deadline, "HH:MM", at the server; without one, returns the stored one.

    Raises:
        UsageError: it is no time of day.
    """
    if done_by is None:
        stored = Variable.get(DONE_BY)
        return None if stored is None else str(stored)
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", done_by):
        raise UsageError(f"--done-by {done_by} is no time of day: give hours and minutes, such as 08:00.")
    Variable.set(DONE_BY, done_by, overwrite=True)
    return done_by


def windows(schedule: CronSchedule, done_by: str | None) -> dict[str, timedelta]:
    """Times that automations.yaml gives in words, for a schedule with a deadline; without one, it is the next begin."""
    dated = DatedSchedule(cron=schedule.cron, timezone=schedule.timezone)
    zone = ZoneInfo(schedule.timezone or "UTC")
    dates = asyncio.run(dated.get_dates(n=_NUM_DATES))
    begins = [datetime.fromtimestamp(date.timestamp(), zone) for date in dates]
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    if done_by is None:
        allowed = min(gaps)
    else:
        hour, minute = map(int, done_by.split(":"))
        deadlines = [begin.replace(hour=hour, minute=minute, second=0, microsecond=0) for begin in begins]
        allowed = min(
            deadline - begin + (timedelta(days=1) if deadline <= begin else timedelta())
            for begin, deadline in zip(begins, deadlines, strict=True)
        )
    return {"until the deadline": allowed, "between two deadlines": max(gaps) + allowed}


def notification_block(client: SyncPrefectClient, choice: str) -> UUID:
    """The block TYPE/NAME at the server; with VIRNUC_NOTIFY_URL, it is made or changed to that address.

    Raises:
        UsageError: there is no such block, it sends no notifications, or blocks of its type need more than an address.
    """
    kind, _, name = choice.partition("/")
    url = env().notify_url
    if url is not None:
        _block_of(kind, url).save(name or "virnuc", overwrite=True)
    try:
        document = client.read_block_document_by_name(name or "virnuc", kind)
    except ObjectNotFound as error:
        raise UsageError(
            f"--notify {choice}: the Prefect server has no such block. Make it on the server's page of blocks, or set "
            f"{NOTIFY_VARIABLE} to its address."
        ) from error
    if document.block_schema is None or "notify" not in document.block_schema.capabilities:
        raise UsageError(
            f"--notify {choice}: blocks of this type send no notifications. Give one such as slack-webhook/NAME."
        )
    return document.id


def _block_of(
    kind: str, url: SecretStr
) -> SlackWebhook | MicrosoftTeamsWebhook | CustomWebhookNotificationBlock:
    """A new block of a type that needs no more than an address, which it keeps secret."""
    match kind:
        case "slack-webhook":
            return SlackWebhook(url=url)
        case "ms-teams-webhook":
            return MicrosoftTeamsWebhook(url=url)
        case "custom-webhook":
            return CustomWebhookNotificationBlock.model_validate(
                {
                    "name": "virnuc",
                    "url": "{{address}}",  # the server shows this field, and hides the secrets
                    "secrets": {"address": url.get_secret_value()},
                    "json_data": {"subject": "{{subject}}", "body": "{{body}}"},
                }
            )
    raise UsageError(
        f"--notify {kind}: from {NOTIFY_VARIABLE} only a slack-webhook, ms-teams-webhook or custom-webhook is made. "
        "Make a block of another type on the server's page of blocks, and unset the variable."
    )


def wanted_automations(
    windows: Mapping[str, timedelta], existing: Sequence[Automation], block: UUID | None, *, notify: bool
) -> list[AutomationCore]:
    """The automations to register; of those whose time is in words, the ones in `windows`.

    Args:
        windows: as of `windows`.
        existing: what the server has of them; a person may have disabled one.
        block: where notifications go with `notify`.
        notify: whether that is to change; otherwise they go where they went before.
    """
    found = {automation.name: automation for automation in existing}
    wanted = []
    for item in copy.deepcopy(yaml.safe_load(AUTOMATIONS_FILE.read_text())["automations"]):
        trigger, before = item["trigger"], found.get(item["name"])
        if isinstance(trigger["within"], str):
            if trigger["within"] not in windows:
                continue
            trigger["within"] = windows[trigger["within"]].total_seconds()
        for number, action in enumerate(item["actions"]):
            if action["type"] == "send-notification":
                target = block if notify else _notified_block(before)
                item["actions"][number] = (
                    {**action, "block_document_id": target} if target else {"type": "do-nothing"}
                )
        wanted.append(AutomationCore.model_validate({**item, "enabled": before is None or before.enabled}))
    return wanted


def notified_block(client: SyncPrefectClient) -> str | None:
    """The block TYPE/NAME that gets the alarms, if any."""
    for automation in client.read_automations():
        if automation.name.startswith(PREFIX) and (block := _notified_block(automation)):
            document = client.read_block_document(block)
            kind = document.block_type.slug if document.block_type else document.block_type_name
            return f"{kind}/{document.name}"
    return None


def _notified_block(automation: Automation | None) -> UUID | None:
    for action in automation.actions if automation else ():
        if isinstance(action, SendNotification):
            return action.block_document_id
    return None
