"""prefect.yaml: what it names is there, and what it sets can be set."""

from typing import Any

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint

from deployments.register import HEARTBEAT_TIMEOUT, NIGHTLY, PREFECT_FILE
from deployments.server import GPU_POOL, POOLS, RUNS_POOL
from flows.pool import LANE_DEPLOYMENT, PLAN_DEPLOYMENT, WORK_POOL

DOCUMENT: dict[str, Any] = yaml.safe_load(PREFECT_FILE.read_text())
DEPLOYMENTS: list[dict[str, Any]] = DOCUMENT["deployments"]


def full_name(item: dict[str, Any]) -> str:
    return f"{load_flow_from_entrypoint(item['entrypoint']).name}/{item['name']}"


def test_the_deployments_and_their_pools() -> None:
    assert {full_name(item): item["work_pool"]["name"] for item in DEPLOYMENTS} == {
        "predict/on-demand": RUNS_POOL,
        "embed/on-demand": RUNS_POOL,
        "reprocess/on-demand": RUNS_POOL,
        "train/on-demand": RUNS_POOL,
        "evaluate/on-demand": RUNS_POOL,
        NIGHTLY: RUNS_POOL,
        LANE_DEPLOYMENT: GPU_POOL,
        PLAN_DEPLOYMENT: GPU_POOL,
    }
    assert set(POOLS) == {GPU_POOL, RUNS_POOL}
    assert WORK_POOL == GPU_POOL


@pytest.mark.parametrize("item", DEPLOYMENTS, ids=lambda item: item["entrypoint"])
def test_parameters_and_environment(item: dict[str, Any]) -> None:
    parameters = item.get("parameters", {})
    known = load_flow_from_entrypoint(item["entrypoint"]).parameters.properties
    assert set(parameters) <= set(known)
    assert parameters.get("mode") == ("pool" if "mode" in known else None)
    assert "virnuc" in item["tags"]
    assert all(isinstance(value, str) for value in item["work_pool"]["job_variables"]["env"].values())


def test_code_comes_from_the_installation_of_each_host() -> None:
    assert DOCUMENT["pull"] == []
    assert not any(":" in item["entrypoint"] for item in DEPLOYMENTS)


def test_three_heartbeats_may_be_missed() -> None:
    for item in DEPLOYMENTS:
        frequency = int(item["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert HEARTBEAT_TIMEOUT.total_seconds() > 3 * frequency


def test_nightly_schedule_rests_until_it_has_folders() -> None:
    [nightly] = [item for item in DEPLOYMENTS if "schedules" in item]
    [schedule] = nightly["schedules"]
    assert full_name(nightly) == NIGHTLY
    assert schedule["active"] is False
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).timezone == "UTC"
