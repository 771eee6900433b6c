"""The project of a run: its tags in MLflow and Prefect, `virnuc usage`, and the monthly table."""

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from flows.usage import report_usage
from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core import env_config

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_gpu_hours_of_a_project(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/tracking.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("VIRNUC_GPU_HOUR_PRICE", "2")
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    command = ("predict", contigs, "--out", tmp_path / "run", *models.flags)
    document = virnuc.done(*command, "--project", "soil", "--json").document
    data = MlflowClient(uri).get_run(document["links"]["mlflow_run_id"]).data
    assert (data.tags["virnuc.project"], data.params["project"]) == ("soil", "soil")
    assert (data.metrics["gpu_hours"], data.metrics["gpu_cost"]) == (0.0, 0.0)  # on the CPU
    month = f"{datetime.now(UTC):%Y-%m}"
    expected = {"project": "soil", "runs": 1, "gpu_hours": 0.0, "gpu_cost": 0.0}
    assert virnuc.done("usage", "--json").document == {"month": month, "projects": [expected]}
    assert "soil" in virnuc.done("usage", "--month", month).out
    assert "no runs in 2020-01" in virnuc.done("usage", "--month", "2020-01").out
    virnuc.refused(2, "2020-13 is no month", "usage", "--month", "2020-13")
    virnuc.refused(2, "project", *command, "--project", "two words")

    report_usage(month)
    wanted = ArtifactFilter.model_validate({"key": {"any_": ["virnuc-usage"]}})
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(data.tags["prefect.flow_run_id"]))
        [table] = client.read_artifacts(artifact_filter=wanted)
    assert "virnuc.project:soil" in run.tags
    assert f"mlflow:{document['links']['mlflow_run_id']}" in run.tags
    assert '"soil"' in str(table.data)
