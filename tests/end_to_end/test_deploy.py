"""`virnuc server deploy`: registration at a server, and the models, schedule and folders of the nightly run."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.register import NIGHTLY, NightlyChoice, register
from deployments.server import POOLS
from flows import GPU_POOL
from flows.nightly import nightly
from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core import __version__, env_config
from virnuc_core.errors import UsageError

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def note_of_nightly(virnuc: CommandLine, *flags: object) -> str:
    registered = virnuc.done("server", "deploy", *flags, "--json").document["registered"]
    [note] = [item["note"] for item in registered if item["name"] == NIGHTLY]
    return str(note)


def test_registering_again_keeps_everything(client: SyncPrefectClient) -> None:
    register(NightlyChoice())
    before = {deployment.id for deployment in client.read_deployments()}
    again = register(NightlyChoice())
    queues = [queue for pool in POOLS.values() for queue in pool.queues]
    automations = {found.name: found.trigger for found in client.read_automations()}
    assert len(again) == len(before) + len(POOLS) + len(queues) + len(automations)
    assert "virnuc: there was no nightly run" not in automations  # without folders there can be none
    assert all(item.line.startswith("updated ") for item in again)
    [batch] = [item for item in again if item.name == NIGHTLY]
    assert "resting until --inbox and --out are given" in batch.note
    deployments = client.read_deployments()
    assert {deployment.id for deployment in deployments} == before
    assert {deployment.version for deployment in deployments} == {__version__}
    for name, pool in POOLS.items():
        found = sorted(client.read_work_queues(work_pool_name=name), key=lambda queue: queue.priority)
        assert [queue.name for queue in found] == [*pool.queues, "default"]


@pytest.mark.slow
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
    assert ", preset tiny, priority" in note_of_nightly(virnuc, "--preset", "tiny")

    # Other settings are set one by one.
    assert "precision fp32" in note_of_nightly(virnuc, "--precision", "fp32", "--files-at-once", 3)
    assert note_of_nightly(virnuc, "--devices", "cpu").endswith(
        "preset tiny, precision fp32, devices cpu, priority bulk, files_at_once 3"
    )

    # What a person has set on the server stays, but for what is given.
    deployment = client.read_deployment_by_name(NIGHTLY)
    client.update_deployment_schedule(deployment.id, deployment.schedules[0].id, active=False)
    for flags in ((), ("--chunk-length", "300")):
        assert "30 1 * * * Europe/Berlin, paused, " in note_of_nightly(virnuc, *flags)
    deployed = client.read_deployment_by_name(NIGHTLY).parameters
    assert deployed["inbox"] == str(inbox)
    assert deployed["settings"] == {"chunk_length": 300, "devices": ["cpu"], "precision": "fp32"}
    for flags, is_compiled in ((["--compile"], True), ([], True), (["--no-compile"], False)):
        note_of_nightly(virnuc, *flags)
        assert client.read_deployment_by_name(NIGHTLY).parameters["settings"]["compile"] is is_compiled
    assert "paused" not in note_of_nightly(virnuc, "--cron", "0 4 * * *")


def test_a_threshold_and_a_false_discovery_rate_replace_each_other(client: SyncPrefectClient) -> None:
    for settings in ({"threshold": 0.9, "precision": "fp32"}, {"fdr": 0.05}, {"threshold": 0.8}):
        register(NightlyChoice(settings=settings))
        deployed = client.read_deployment_by_name(NIGHTLY).parameters["settings"]
        assert {k: v for k, v in deployed.items() if k in ("threshold", "fdr")} == {
            k: v for k, v in settings.items() if k != "precision"
        }
        assert deployed["precision"] == "fp32"


def test_parameters_that_a_flow_no_longer_has_are_dropped(client: SyncPrefectClient) -> None:
    register(NightlyChoice())
    flow_id = client.read_deployment_by_name(NIGHTLY).flow_id
    stored = {"inbox": "/in", "old_name": 1, "settings": {"preset": "tiny", "old_setting": 2}}
    client.create_deployment(flow_id, "nightly", parameters=stored, enforce_parameter_schema=False)
    [batch] = [item for item in register(NightlyChoice()) if item.name == NIGHTLY]
    assert batch.note.endswith("without old_name and settings.old_setting, which nightly no longer has")
    kept = client.read_deployment_by_name(NIGHTLY).parameters
    assert kept == {"inbox": "/in", "mode": "pool", "priority": "bulk", "settings": {"preset": "tiny"}}


def last_changes(client: SyncPrefectClient) -> dict[str, str]:
    found = client.request("POST", "/automations/filter", json={}).json()
    return {automation["name"]: automation["updated"] for automation in found}


def test_alarms_keep_their_deadline_and_their_block(
    virnuc: CommandLine, client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarms() -> dict[str, Any]:
        return {found.name.removeprefix("virnuc: "): found for found in client.read_automations()}

    virnuc.refused(2, "no such block", "server", "deploy", "--notify", "custom-webhook/ops")
    virnuc.refused(2, "is no time of day", "server", "deploy", "--done-by", "8")
    monkeypatch.setenv("VIRNUC_NOTIFY_URL", "http://127.0.0.1:9/hook-key")
    env_config.reload()
    virnuc.refused(2, "only a slack-webhook", "server", "deploy", "--notify", "pager-duty-webhook/ops")
    folders = ("--inbox", tmp_path, "--out", tmp_path / "out", "--cron", "0 2 * * *", "--timezone", "UTC")
    virnuc.done("server", "deploy", *folders, "--done-by", "08:00", "--notify", "custom-webhook/ops")
    monkeypatch.delenv("VIRNUC_NOTIFY_URL")
    env_config.reload()
    late = alarms()["a nightly run is not done in time"]
    assert late.trigger.within == timedelta(hours=6)
    [action] = late.actions
    document = client.read_block_document(action.block_document_id, include_secrets=False)
    assert (document.name, document.data["url"]) == ("ops", "{{address}}")
    assert "hook-key" not in str(document.data)

    before = last_changes(client)
    virnuc.done("server", "deploy")  # changes nothing, and so forgets no night that is waited for
    assert last_changes(client) == before
    virnuc.done("server", "deploy", "--cron", "0 4 * * *")
    moved = alarms()["a nightly run is not done in time"]
    assert (moved.trigger.within, moved.actions) == (timedelta(hours=4), [action])
    assert alarms()["there was no nightly run"].trigger.within == timedelta(hours=28)
    shown = virnuc.done("server", "deploy", "--show", "--json").document
    assert (shown["schedule"], shown["done_by"], shown["notify"]) == (
        "0 4 * * * UTC",
        "08:00",
        "custom-webhook/ops",
    )
    assert shown["inbox"] == str(tmp_path)
    virnuc.done("server", "deploy", "--notify", "none")
    assert [action.type for alarm in alarms().values() for action in alarm.actions].count("do-nothing") == 5


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--head absent.pth", 4, "no classifier head absent.pth"),
        ("--preset virnucpro-500", 2, "no head is bundled for DNABERT-S and 3B"),
        ("--esm-model 4B", 4, "there is no model 4B"),
        ("--chunk-length 2", 2, "--chunk-length"),
        ("--cron 0_25_*_*_*", 2, "this schedule cannot be used: --cron"),
        ("--timezone Mars/Phobos", 2, "this schedule cannot be used: --timezone"),
    ],
)
def test_what_cannot_be_used_is_refused_when_it_is_deployed(
    virnuc: CommandLine, flags: str, code: int, message: str
) -> None:
    virnuc.refused(code, message, "server", "deploy", *(flag.replace("_", " ") for flag in flags.split()))


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


@pytest.mark.timeout(150)  # a worker that is not refused goes on for ever
def test_work_pools_for_a_kubernetes_cluster(virnuc: CommandLine, client: SyncPrefectClient) -> None:
    register(NightlyChoice())
    virnuc.refused(
        2,
        "work pool virnuc-gpu at the server is of type 'process'",
        "server",
        "deploy",
        "--pool-type",
        "kubernetes",
    )
    for pool in POOLS:
        client.delete_work_pool(pool)
    chosen = ("--job-variable", "image=registry/virnuc:1", "virnuc-gpu.gpus=2")
    try:
        virnuc.done("server", "deploy", "--pool-type", "kubernetes", *chosen)
        virnuc.done("server", "deploy", "--job-variable", "virnuc-gpu.cpu=16")  # stays what it is
        assert {client.read_work_pool(pool).type for pool in POOLS} == {"kubernetes"}
        virnuc.refused(2, "has no work pool virnuc-gpu and", "server", "worker", "--devices", "cpu")
        variables = client.read_work_pool(GPU_POOL).base_job_template["variables"]["properties"]
        assert [variables[name]["default"] for name in ("image", "gpus", "cpu")] == [
            "registry/virnuc:1",
            2,
            "16",
        ]
        assert client.read_deployment_by_name("embed-lane/gpu").work_pool_name == GPU_POOL
    finally:
        for pool in POOLS:
            client.delete_work_pool(pool)
        register(NightlyChoice())
