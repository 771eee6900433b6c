"""What `virnuc server up` makes, and its nightly schedule and runs; tests/end_to_end/test_deploy.py tests registration."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments.register import NIGHTLY
from deployments.server import missing_pools, workers_since
from tests.end_to_end.conftest import wait_until
from tests.production.conftest import Stack

AUTOMATION = "virnuc: runs that do not begin have crashed"


def test_everything_is_there_after_up(stack: Stack) -> None:
    at_stack = {
        PREFECT_API_URL: stack.access["PREFECT_API_URL"],
        PREFECT_API_AUTH_STRING: stack.access["PREFECT_API_AUTH_STRING"],
    }
    with temporary_settings(at_stack):
        assert missing_pools() == []
        assert len(workers_since(datetime.now(UTC) - timedelta(seconds=60))) == 2
    names = {deployment.name for deployment in stack.client.read_deployments()}
    assert names == {"on-demand", "nightly", "gpu", "cpu"}
    assert stack.client.read_work_pool("virnuc-runs").concurrency_limit == 16
    assert stack.client.read_deployment_by_name("plan-run/gpu").work_queue_name == "plans"
    [automation] = stack.client.read_automations_by_name(AUTOMATION)
    assert automation.enabled


def test_both_servers_give_metrics(stack: Stack) -> None:
    auth = (stack.access["MLFLOW_TRACKING_USERNAME"], stack.access["MLFLOW_TRACKING_PASSWORD"])
    prefect = httpx.get(f"http://127.0.0.1:{stack.port}/api/metrics", auth=auth).raise_for_status().text
    assert "process_resident_memory_bytes" in prefect
    assert "prefect_" in prefect
    mlflow = f"http://127.0.0.1:{stack.mlflow_port}"
    httpx.get(f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=0", auth=auth).raise_for_status()
    counted = httpx.get(f"{mlflow}/metrics", auth=auth).raise_for_status().text
    assert 'mlflow_http_request_total{method="GET",status="200"}' in counted


@pytest.mark.slow
def test_nightly_schedule(stack: Stack, tmp_path: Path) -> None:
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    waiting = {"deployment_id": {"any_": [nightly.id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}

    def scheduled() -> list[FlowRun]:
        return stack.client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting))

    assert scheduled() == []
    folders = ("--inbox", tmp_path / "inbox", "--out", tmp_path / "out")
    done = stack.shell("virnuc_cli", "server", "deploy", *folders)
    assert done.returncode == 0, done.stderr
    assert "0 2 * * * UTC, the small bundled models" in done.stdout
    # With too new an SQLAlchemy, nothing is ever scheduled, without an error.
    wait_until(lambda: len(scheduled()) >= 3, 90)
    first = min(run.expected_start_time for run in scheduled() if run.expected_start_time)
    assert (first.hour, first.minute) == (2, 0)


@pytest.mark.slow
def test_nightly_batch(stack: Stack, examples_dir: Path, tmp_path: Path) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    shutil.copy(examples_dir / "contigs.fa.gz", inbox)
    (inbox / "bad.fa").write_text("no sequence at all\n")
    nightly = stack.client.read_deployment_by_name(NIGHTLY)
    # In its own process; other tests cover lanes in the pool.
    asked = {"inbox": str(inbox), "out": str(out), "mode": "local", "settle_seconds": 0}
    run = stack.client.create_flow_run_from_deployment(nightly.id, parameters=asked)
    stack.wait_for(run.id, "FilesRejected")
    assert (inbox / "rejected" / "bad.fa").exists()
    assert len(list(out.glob("contigs*/run.json"))) == 1
