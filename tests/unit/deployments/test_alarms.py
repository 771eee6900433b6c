"""Deadlines of the nightly batch, and the automations that watch it."""

from datetime import timedelta
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import Automation, EventTrigger

from deployments.alarms import AUTOMATIONS_FILE, PREFIX, wanted_automations, windows
from flows.nightly import FILES_REJECTED
from tasks.artifacts import RUN_TAG

ALL = len(yaml.safe_load(AUTOMATIONS_FILE.read_text())["automations"])


@pytest.mark.parametrize(
    ("cron", "done_by", "hours"),
    [
        ("0 2 * * *", "08:00", (6, 30)),
        ("0 22 * * *", "06:30", (8.5, 32.5)),
        ("0 2 * * *", "02:00", (24, 48)),
        ("0 2 * * *", None, (24, 48)),
        ("0 20 * * 1-5", "08:00", (12, 84)),
        ("0 8,20 * * *", "09:00", (1, 13)),
    ],
)
def test_deadline_is_that_after_the_batch_begins(
    cron: str, done_by: str | None, hours: tuple[float, float]
) -> None:
    found = windows(CronSchedule(cron=cron, timezone="UTC"), done_by)
    assert tuple(window / timedelta(hours=1) for window in found.values()) == hours


def test_the_change_of_clocks_does_not_move_a_deadline() -> None:
    found = windows(CronSchedule(cron="0 1 * * *", timezone="Europe/Berlin"), "08:00")
    assert found["until the deadline"] == timedelta(hours=7)


def test_alarms_can_be_registered_and_notify_whom_they_are_told_to() -> None:
    times = windows(CronSchedule(cron="0 2 * * *", timezone="UTC"), "08:00")
    silent = wanted_automations(times, [], None, notify=False)
    assert len(silent) == ALL == len(wanted_automations({}, [], None, notify=False)) + 2
    assert all(automation.name.startswith(PREFIX) for automation in silent)

    block = uuid4()
    loud = wanted_automations(times, [], block, notify=True)
    targets = [[getattr(action, "block_document_id", None) for action in one.actions] for one in loud]
    assert targets == [[None], *[[block]] * (ALL - 1)]
    at_server = [Automation(id=uuid4(), **dict(one)) for one in loud]
    at_server[1].enabled = False
    kept = wanted_automations(times, at_server, None, notify=False)
    assert [dict(one) for one in kept] == [{**dict(one), "enabled": one.name != loud[1].name} for one in loud]
    off = wanted_automations(times, at_server, None, notify=True)
    assert {type(one.actions[0]) for one in off[1:]} == {DoNothing}
    assert {type(one.actions[0]) for one in loud[1:]} == {SendNotification}


def test_alarms_go_by_the_tags_and_states_of_the_flows() -> None:
    triggers = [one.trigger for one in wanted_automations({}, [], None, notify=False)]
    assert f"prefect.tag.{RUN_TAG}" in str(triggers[0])
    [failures] = [
        trigger
        for trigger in triggers
        if isinstance(trigger, EventTrigger) and "Crashed" in str(trigger.expect)
    ]
    assert f"prefect.flow-run.{FILES_REJECTED}" in failures.expect
