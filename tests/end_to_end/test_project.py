"""The project of a run: its tags in MLflow and Prefect, and its GPU hours."""

from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client

from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core import env_config

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_gpu_hours_of_a_project(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/tracking.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    command = ("predict", contigs, "--out", tmp_path / "run", *models.flags)
    document = virnuc.done(*command, "--project", "soil", "--json").document
    data = MlflowClient(uri).get_run(document["links"]["mlflow_run_id"]).data
    assert (data.tags["virnuc.project"], data.params["project"]) == ("soil", "soil")
    assert data.metrics["gpu_hours"] == 0.0  # on the CPU
    virnuc.refused(2, "project", *command, "--project", "two words")
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(data.tags["prefect.flow_run_id"]))
    assert "virnuc.project:soil" in run.tags
    assert f"mlflow:{document['links']['mlflow_run_id']}" in run.tags
