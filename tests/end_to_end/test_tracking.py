"""What Prefect and MLflow record of a run, and that a run does not depend on MLflow."""

import asyncio
import json
from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.logging.handlers import APILogHandler

from tasks import artifacts
from tests.end_to_end.conftest import Checkpoints, CommandLine
from virnuc_core import env_config


@pytest.fixture(autouse=True)
def _no_figures() -> None:
    """Overrides the fixture: plots are drawn here."""


def test_run_is_found_again_in_mlflow_and_in_prefect(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = f"sqlite:///{tmp_path}/tracking.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    out = tmp_path / "run"
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    flags = (*checkpoints.flags, "--shard-seconds", "0.001")
    result = virnuc_flows("predict", contigs, "--out", out, "--json", *flags)
    document = json.loads(result.out)

    client = MlflowClient(uri)
    run = client.get_run(document["links"]["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["esm2_model"] == "esm2_random"
    assert run.data.params["dnabert_s_embedding_dim"] == "24"
    assert run.data.params["esm2_precision"] == "fp32"
    assert run.data.params["mode"] == "local"
    assert run.data.metrics["rejected"] == 1
    assert 0 < run.data.metrics["esm2_packing_efficiency"] <= 1
    assert run.data.metrics["residues_per_second"] > 0
    assert run.data.metrics["progress/shards"] == document["shards"]["total"] > 1
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.digest == document["inputs"][0]["sha256"][:36]
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"predictions.tsv", "contigs.tsv", "report.html", "run.json"} <= files
    assert {"lanes.tsv", "p_virus.png", "throughput.png"} <= files
    assert "contigs called virus" in run.data.tags["mlflow.note.content"]

    (lane,) = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'")
    assert lane.info.status == "FINISHED"
    assert lane.data.metrics["shards"] == document["shards"]["total"]
    asyncio.run(look_at_prefect(run.data.tags["prefect.flow_run_id"], run.info.run_id))


async def look_at_prefect(flow_run_id: str, mlflow_run_id: str) -> None:
    await APILogHandler.aflush()
    async with get_client() as client:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
        assert flow_run.state is not None
        assert flow_run.state.is_completed()
        assert "contigs.fa" in flow_run.name
        assert f"mlflow:{mlflow_run_id}" in flow_run.tags
        (lane,) = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]))
        )
        shown = {
            flow_run.id: await artifacts_of(client, flow_run.id),
            lane.id: await artifacts_of(client, lane.id),
        }
        assert shown[flow_run.id].keys() == {"virnuc-summary", "virnuc-lanes", "virnuc-packing"}
        assert mlflow_run_id in str(shown[flow_run.id]["virnuc-summary"])
        assert shown[lane.id] == {"virnuc-lane-0": 100.0}
        lines = {run.id: await lines_of(client, run.id) for run in (flow_run, lane)}
    assert any(line.startswith("plan: esm2_random") for line in lines[flow_run.id])
    assert any(line.startswith("lane 0: shard 1 of ") for line in lines[lane.id])


async def artifacts_of(client: PrefectClient, flow_run_id: UUID) -> dict[str | None, object]:
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    return {artifact.key: artifact.data for artifact in await client.read_artifacts(artifact_filter=of_run)}


async def lines_of(client: PrefectClient, flow_run_id: UUID) -> list[str]:
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))
    return [log.message for log in await client.read_logs(of_run)]


def test_store_that_cannot_be_written_costs_no_result(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/tracking.db")
    env_config.reload()
    result = virnuc_flows("predict", contigs, "--out", tmp_path / "run", *checkpoints.flags)
    assert result.code == 0, result.err
    assert (tmp_path / "run" / "run.json").exists()
    assert result.err.count("warning: MLflow") == 1
