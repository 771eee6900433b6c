"""Nightly batches with real workers, and alarms that reach a real webhook."""

import gzip
import json
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.schemas.objects import FlowRun
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled

from deployments.deploy import FILES
from flows.nightly import SMALL_BYTES
from tests.end_to_end.conftest import random_dna, wait_until
from tests.production.conftest import SETTINGS, Stack

pytestmark = pytest.mark.slow

NIGHTLY = "nightly/nightly"
NUM_FILES = 20


class Webhook(HTTPServer):
    """Keeps the messages that it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.messages: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Webhook)
        self.server.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as webhook:
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        yield webhook
        webhook.shutdown()


@pytest.fixture
def folders(stack: Stack, webhook: Webhook, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Inbox and results of the nightly batch, whose alarms go to the webhook."""
    inbox, out, site = tmp_path / "inbox", tmp_path / "out", tmp_path / "site"
    inbox.mkdir()
    site.mkdir()
    at_stack = {
        PREFECT_API_URL: stack.access["PREFECT_API_URL"],
        PREFECT_API_AUTH_STRING: stack.access["PREFECT_API_AUTH_STRING"],
    }
    with temporary_settings(at_stack):
        block = CustomWebhookNotificationBlock.model_validate(
            {
                "name": "nights",
                "url": webhook.url,
                "json_data": {"subject": "{{subject}}", "body": "{{body}}"},
            }
        ).save("nights", overwrite=True)
    shutil.copytree(FILES, site, dirs_exist_ok=True)
    night, alarms = site / "prefect.yaml", site / "alarms.yaml"
    text = (
        night.read_text()
        .replace("/data/inbox", str(inbox))
        .replace("/data/results", f"{out}\n      settle_seconds: 0")
    )
    night.write_text(text.replace("settings: {}", f"settings: {{devices: {SETTINGS['devices']}}}"))
    alarms.write_text(alarms.read_text().replace("BLOCK-ID", str(block)).replace("21600", "60"))
    done = stack.shell("virnuc_cli", "server", "deploy", site)
    assert done.returncode == 0, done.stderr
    yield inbox, out
    assert stack.shell("virnuc_cli", "server", "deploy").returncode == 0


def begin_night(stack: Stack, **parameters: Any) -> UUID:
    deployment = stack.client.read_deployment_by_name(NIGHTLY)
    return stack.client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def ended(stack: Stack, run_id: UUID) -> FlowRun | None:
    run = stack.client.read_flow_run(run_id)
    return run if run.state is not None and run.state.is_final() else None


def disable(stack: Stack, *names: str) -> None:
    """Turns off the alarms of this name, which other runs of the tests would raise."""
    for automation in stack.client.read_automations():
        if automation.name in names:
            stack.client.pause_automation(automation.id)


@pytest.mark.timeout(1800)
def test_two_nights_asked_for_at_once_over_twenty_files_three_of_them_broken(
    stack: Stack, webhook: Webhook, folders: tuple[Path, Path], examples_dir: Path
) -> None:
    """One after the other: the second has nothing left to do."""
    inbox, out = folders
    contigs = gzip.decompress((examples_dir / "contigs.fa.gz").read_bytes())
    (inbox / "00.fa").write_bytes(contigs + b"\n" * SMALL_BYTES)  # a large file
    names = [f"{number:02}.fa" for number in range(1, NUM_FILES)]
    for number, name in enumerate(names):
        text = f"no sequence {name}\n" if number < 3 else f">{name}\n{random_dna(600, seed=number)}\n"
        (inbox / name).write_text(text)
    disable(stack, "virnuc: nightly run overdue")
    nights = [begin_night(stack) for _ in range(2)]
    runs = [wait_until(lambda night=night: ended(stack, night), 1500) for night in nights]  # type: ignore[misc]
    assert {run.state_name for run in runs} == {"FilesRejected", "Completed"}, [run.state for run in runs]

    results = [path.parent.name.partition("-")[0] for path in out.glob("*/run.json")]
    assert sorted(results) == ["00", *(name.removesuffix(".fa") for name in names[3:])]
    children = [child for night in nights for child in stack.children(night).values()]
    batches = [child for child in children if "files" in child.parameters]
    assert [len(batch.parameters["files"]) for batch in batches] == [len(names)]
    assert all("virnuc" in child.tags for child in children)
    assert {batch.work_queue_name for batch in batches} == {"bulk"}
    for name in names[:3]:
        assert "neither FASTA nor FASTQ" in (inbox / "rejected" / f"{name}.reason.txt").read_text()
    wait_until(lambda: webhook.messages, 30)
    [alarm] = webhook.messages
    assert alarm["subject"].endswith(" ended as FilesRejected")
    assert "rejected" in alarm["body"]


def test_a_night_whose_parent_is_killed_goes_on_with_its_batch(
    stack: Stack, webhook: Webhook, folders: tuple[Path, Path], examples_dir: Path
) -> None:
    """Scheduled again by the server, it waits for the batch that it had begun."""
    inbox, out = folders
    shutil.copy(examples_dir / "contigs.fa.gz", inbox)
    night = begin_night(stack)
    [batch] = wait_until(lambda: stack.children(night), 120)
    # A batch that has not begun finds that its night is over.
    wait_until(lambda: [*out.glob("contigs-*")], 120)
    stack.process_of(night).kill()
    stack.wait_for(night, "Crashed", 60)
    wait_until(lambda: any("Crashed" in message["subject"] for message in webhook.messages), 30)
    wait_until(lambda: stack.state(night) == "Completed", 300)
    assert stack.state(batch) == "Completed"
    assert list(stack.children(night)) == [batch]
    assert len(list(out.glob("contigs-*/run.json"))) == 1


def shorten(stack: Stack, name: str) -> None:
    """Lets an automation wait for ten seconds."""
    [found] = stack.client.read_automations_by_name(name)
    assert isinstance(found.trigger, EventTrigger)
    found.trigger.within = timedelta(seconds=10)
    wanted = found.model_dump(include=set(AutomationCore.model_fields) - {"owner_resource"})
    stack.client.update_automation(found.id, AutomationCore.model_validate(wanted))


def test_a_night_that_no_worker_takes_raises_an_alarm_soon_and_at_its_deadline(
    stack: Stack, webhook: Webhook, folders: tuple[Path, Path]
) -> None:
    shorten(stack, "virnuc: nightly run not started")
    queue = stack.client.read_deployment_by_name(NIGHTLY).work_queue_name
    assert queue is not None
    nights = stack.client.read_work_queue_by_name(queue, work_pool_name="virnuc-runs")
    stack.client.update_work_queue(nights.id, is_paused=True)
    night = begin_night(stack)
    try:
        wait_until(lambda: len(webhook.messages) == 2, 180)
    finally:
        stack.client.set_flow_run_state(night, Cancelled(), force=True)
        stack.client.update_work_queue(nights.id, is_paused=False)
    first, second = webhook.messages
    assert first["subject"].endswith(" has not started")
    assert second["subject"].endswith(" is overdue")
    assert second["body"].startswith("Its state is Late; ")
