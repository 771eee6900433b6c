"""What Prefect and MLflow keep of a run, and that a run does not depend on MLflow."""

import asyncio
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tests.end_to_end.conftest import Checkpoints, CommandLine
from virnuc_core import env_config

pytestmark = pytest.mark.xdist_group("flows")


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
    result = virnuc_flows("predict", contigs, "--out", out, "--json", *checkpoints.flags)
    document = json.loads(result.out)

    client = MlflowClient(uri)
    run = client.get_run(document["links"]["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["esm2_model"] == "esm2_random"
    assert run.data.params["dnabert_s_embedding_dim"] == "24"
    assert run.data.params["esm2_precision"] == "fp32"
    assert run.data.metrics["rejected"] == 1
    assert 0 < run.data.metrics["esm2_packing_efficiency"] <= 1
    assert run.data.metrics["residues_per_second"] > 0
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"predictions.tsv", "contigs.tsv", "run.json"} <= files

    tables = asyncio.run(summary_tables(run.data.tags["prefect.flow_run_id"]))
    assert any(run.info.run_id in table for table in tables)


async def summary_tables(flow_run_id: str) -> list[str]:
    async with get_client() as client:
        flow_run = await client.read_flow_run(flow_run_id)
        assert flow_run.state is not None
        assert flow_run.state.is_completed()
        assert "contigs.fa" in flow_run.name
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["virnuc-summary"]))
        return [str(artifact.data) for artifact in await client.read_artifacts(artifact_filter=key)]


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
