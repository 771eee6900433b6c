"""`virnuc deploy`: registration at a server, and the models, schedule and folders of the nightly run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.register import NIGHTLY, NightlyChoice, register
from deployments.server import POOLS
from flows.nightly import nightly
from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core import __version__
from virnuc_core.errors import UsageError

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def note_of_nightly(virnuc: CommandLine, *flags: object) -> str:
    registered = virnuc.done("deploy", *flags, "--json").document["registered"]
    [note] = [item["note"] for item in registered if item["name"] == NIGHTLY]
    return str(note)


def test_registering_again_keeps_everything(client: SyncPrefectClient) -> None:
    register(NightlyChoice())
    before = {deployment.id for deployment in client.read_deployments()}
    [monthly] = client.read_deployment_by_name("report-usage/monthly").schedules
    client.update_deployment_schedule(monthly.deployment_id, monthly.id, active=False)
    again = register(NightlyChoice())
    queues = [queue for pool in POOLS.values() for queue in pool.queues]
    assert len(again) == len(before) + len(POOLS) + len(queues) + 1
    assert all(item.line.startswith("updated ") for item in again)
    [batch] = [item for item in again if item.name == NIGHTLY]
    assert "resting until --inbox and --out are given" in batch.note
    deployments = client.read_deployments()
    assert {deployment.id for deployment in deployments} == before
    [monthly] = client.read_deployment_by_name("report-usage/monthly").schedules
    assert not monthly.active
    assert {deployment.version for deployment in deployments} == {__version__}
    for name, pool in POOLS.items():
        found = sorted(client.read_work_queues(work_pool_name=name), key=lambda queue: queue.priority)
        assert [queue.name for queue in found] == [*pool.queues, "default"]
    assert len(client.read_automations_by_name("virnuc: runs without a heartbeat have crashed")) == 1


def test_the_nightly_batch_runs_the_models_that_were_deployed(
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    client: SyncPrefectClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    (inbox / "sample.fa").write_bytes(contigs.read_bytes())
    monkeypatch.chdir(models.head.parent)
    relative = ("--esm-model", models.esm2.name, "--head", models.head.name)
    folders = ("--inbox", inbox, "--out", out)
    note = note_of_nightly(virnuc, *folders, *relative, "--dnabert-model", models.dnabert)
    assert f"esm_model {models.esm2}" in note

    deployed = client.read_deployment_by_name(NIGHTLY).parameters
    paths = {"esm_model": models.esm2, "dnabert_model": models.dnabert, "head": models.head}
    assert deployed["settings"] == {name: str(path) for name, path in paths.items()}
    nightly(**{**deployed, "mode": "local", "settle_seconds": 0})
    [report] = out.glob("sample*/run.json")
    assert json.loads(report.read_text())["head"]["location"] == str(models.head)

    # Models are set together: naming one resets the others, naming none keeps all.
    moved = note_of_nightly(virnuc, "--cron", "30 1 * * *", "--timezone", "Europe/Berlin")
    assert moved.startswith("pool virnuc-runs, 30 1 * * * Europe/Berlin, esm_model")
    assert note_of_nightly(virnuc, "--preset", "tiny").endswith(", preset tiny")

    # What a person has set on the server stays, but for what is given.
    deployment = client.read_deployment_by_name(NIGHTLY)
    client.update_deployment_schedule(deployment.id, deployment.schedules[0].id, active=False)
    for flags in ((), ("--chunk-length", "300")):
        assert "30 1 * * * Europe/Berlin, paused, " in note_of_nightly(virnuc, *flags)
    deployed = client.read_deployment_by_name(NIGHTLY).parameters
    assert deployed["inbox"] == str(inbox)
    assert deployed["settings"] == {"chunk_length": 300}
    assert "paused" not in note_of_nightly(virnuc, "--cron", "0 4 * * *")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--head absent.pth", 4, "no classifier head absent.pth"),
        ("--preset virnucpro-500", 2, "no head is bundled for DNABERT-S and 3B"),
        ("--esm-model 4B", 4, "there is no model 4B"),
        ("--chunk-length 2", 2, "chunk_length"),
        ("--cron 0_25_*_*_*", 2, "this schedule cannot be used: --cron"),
        ("--timezone Mars/Phobos", 2, "this schedule cannot be used: --timezone"),
    ],
)
def test_what_cannot_be_used_is_refused_when_it_is_deployed(
    virnuc: CommandLine, flags: str, code: int, message: str
) -> None:
    virnuc.refused(code, message, "deploy", *(flag.replace("_", " ") for flag in flags.split()))


def test_a_server_that_does_not_answer_or_is_not_named() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(UsageError, match=r"127\.0\.0\.1:9/api does not answer"),
    ):
        register(NightlyChoice())
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(UsageError, match="no Prefect server is named"),
    ):
        register(NightlyChoice())
