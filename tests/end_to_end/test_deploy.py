"""`virnuc server deploy` at a real server: what it makes, a site's own files, and crashed runs that are scheduled again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun

from deployments.deploy import FILES, POOLS
from deployments.processes import Programs
from tests.end_to_end.conftest import wait_until
from tests.production.conftest import free_port
from virnuc_core import __version__

ROOT = Path(__file__).parents[2]
AGAIN = "virnuc: reschedule a crashed run"
CANCELLED = "virnuc: cancel a run without a process"
PREFECT = (sys.executable, "-m", "prefect")


class Server:
    """A Prefect server, and commands at it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environment = {
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        self.client = SyncPrefectClient(self.environment["PREFECT_API_URL"])

    def run(self, *command: str | Path, code: int = 0) -> str:
        """What a command prints."""
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            env={**os.environ, **self.environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def deploy(self, *arguments: str | Path, code: int = 0) -> str:
        return self.run("virnuc_cli", "server", "deploy", *arguments, code=code)

    def deployments(self) -> dict[str, Any]:
        """All that the server has of the deployments, but for the times of changes."""
        left_out = {"created": True, "updated": True, "last_polled": True, "status": True}
        schedules = {"__all__": {"created", "updated", "id"}}
        found = self.client.read_deployments()
        return {str(each.id): each.model_dump(exclude={**left_out, "schedules": schedules}) for each in found}

    def automations(self) -> dict[str, Any]:
        return {found.name: found for found in self.client.read_automations()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    server = Server(folder, port)
    with Programs(folder) as programs, server.client:
        programs.start("server", (*PREFECT, "server", "start", "--port", str(port)), server.environment)
        programs.wait_until(lambda: server.client.api_healthcheck() is None)
        yield server


def test_deploying_again_changes_nothing_and_prefect_deploy_gives_the_same(server: Server) -> None:
    lines = server.deploy()
    deployed, automations = server.deployments(), server.automations()
    assert {each["version"] for each in deployed.values()} == {__version__}
    assert set(automations) == {AGAIN, CANCELLED}
    assert server.deploy() == lines
    server.run("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", FILES / "prefect.yaml")
    assert server.deployments() == deployed
    assert server.automations() == automations

    nightly = server.client.read_deployment_by_name("nightly/nightly")
    assert nightly.global_concurrency_limit
    assert nightly.global_concurrency_limit.limit == 1
    assert nightly.concurrency_options
    assert nightly.concurrency_options.collision_strategy == "ENQUEUE"
    assert [schedule.active for schedule in nightly.schedules] == [False]
    for name, queues in POOLS.items():
        found = sorted(server.client.read_work_queues(work_pool_name=name), key=lambda queue: queue.priority)
        assert [queue.name for queue in found] == [*queues, "default"]
    assert server.client.read_work_pool("virnuc-runs").concurrency_limit == 16


@pytest.mark.slow
def test_a_site_has_files_of_its_own(server: Server, tmp_path: Path) -> None:
    site = tmp_path / "site"
    server.deploy(site)
    prefect, alarms = site / "prefect.yaml", site / "alarms.yaml"
    assert prefect.read_bytes() == (FILES / "prefect.yaml").read_bytes()
    assert set(server.automations()) == {AGAIN, CANCELLED}  # nobody to notify is named

    original = prefect.read_text()
    edited = original.replace("/data/inbox", "/lab/inbox").replace("active: false", "active: true")
    prefect.write_text(edited)
    alarms.write_text(alarms.read_text().replace("BLOCK-ID", "5f0c1d84-2c0f-4d2c-9a56-5e2d60a1a1f4"))
    server.deploy(site)
    nightly = server.client.read_deployment_by_name("nightly/nightly")
    assert nightly.parameters["inbox"] == "/lab/inbox"
    assert len(server.automations()) == 7
    waiting = {"deployment_id": {"any_": [nightly.id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}

    def scheduled() -> list[FlowRun]:
        return server.client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting))

    # With too new an SQLAlchemy, nothing is ever scheduled, without an error.
    wait_until(lambda: len(scheduled()) >= 3, 90)
    first = min(run.expected_start_time for run in scheduled() if run.expected_start_time)
    assert (first.hour, first.minute) == (2, 0)

    for before, after, message in (
        ("inbox: ", "inbx: ", "has no parameter inbx"),
        ("settings: {}", "settings: {presett: tiny}", "'presett' was unexpected"),
        (f"&version {__version__}", "&version 0.0.9", f"is for version 0.0.9, but virnuc {__version__} is"),
        ("deployments:", "deploymnts:", "is invalid: 'deployments'"),
    ):
        prefect.write_text(edited.replace(before, after))
        assert message in server.deploy(site, code=2)
    prefect.write_text(original)
    alarms.write_text(alarms.read_text().replace("5f0c1d84-", "ops-"))
    assert f"{alarms} is invalid: Input should be a valid UUID" in server.deploy(site, code=2)
    alarms.write_text((FILES / "alarms.yaml").read_text())
    assert "'virnuc: no nightly run' deleted" in server.deploy(site)
    assert set(server.automations()) == {AGAIN, CANCELLED}


@pytest.mark.slow
def test_a_crashed_run_is_scheduled_again_twice(server: Server, tmp_path: Path) -> None:
    site = tmp_path / "site"
    server.deploy(site)
    prefect, automations, crashing = (
        site / "prefect.yaml",
        site / "automations.yaml",
        "tests.end_to_end.crashing.crash",
    )
    text = prefect.read_text().replace("    parameters: {mode: pool}\n", "")
    for entrypoint in ("flows.on_demand.evaluate", "flows.lanes.plan_run"):
        text = text.replace(entrypoint, crashing)
    prefect.write_text(text)
    automations.write_text(automations.read_text().replace("within: 30", "within: 10"))
    server.deploy(site)
    ids = [
        server.client.create_flow_run_from_deployment(server.client.read_deployment_by_name(name).id).id
        for name in ("crashing/on-demand", "crashing/cpu")  # a plan is left alone
    ]

    def attempts() -> list[tuple[int, str | None]]:
        return [(run.run_count, run.state_name) for run in map(server.client.read_flow_run, ids)]

    with Programs(tmp_path) as workers:
        for pool in ("virnuc-runs", "virnuc-cpu"):
            command = (*PREFECT, "worker", "start", "--type", "process", "--pool", pool)
            workers.start(pool, command, server.environment)
        wait_until(lambda: attempts() == [(3, "Crashed"), (1, "Crashed")], 300)
        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: attempts()[0][1] != "Crashed", 25)
    states = [state.name for state in server.client.read_flow_run_states(ids[0])]
    assert states.count("AwaitingRetry") == 2


@pytest.mark.slow
def test_work_pools_for_a_kubernetes_cluster(server: Server, tmp_path: Path) -> None:
    server.deploy()
    refused = server.deploy("--pool-type", "kubernetes", code=2)
    assert "work pool virnuc-gpu has type 'process'" in refused
    for pool in POOLS:
        server.client.delete_work_pool(pool)
    site = tmp_path / "site"
    server.deploy(site, "--pool-type", "kubernetes")
    template, prefect = site / "kubernetes.json", site / "prefect.yaml"
    template.write_text(template.read_text().replace('"default": "/data"', '"default": "/shared"'))
    prefect.write_text(prefect.read_text().replace("&image virnuc", "&image registry/virnuc:1"))
    server.deploy(site)  # stays what it is
    gpu = server.client.read_work_pool("virnuc-gpu")
    assert gpu.type == "kubernetes"
    assert gpu.base_job_template["variables"]["properties"]["folder"]["default"] == "/shared"
    lane = server.client.read_deployment_by_name("embed-lane/gpu")
    assert lane.job_variables["image"] == "registry/virnuc:1"
    refused = server.run("virnuc_cli", "server", "worker", "--devices", "cpu", code=2)
    assert "has no work pool virnuc-gpu and" in refused


def test_a_server_that_does_not_answer_or_is_not_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server.environment, "PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert "127.0.0.1:9/api does not respond" in server.deploy(code=2)
    monkeypatch.setitem(server.environment, "PREFECT_API_URL", "")
    assert "no Prefect server is set" in server.deploy(code=2)
