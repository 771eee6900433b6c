"""What run.json, Prefect and MLflow record of a run, and that a run does not depend on MLflow."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.logging.handlers import APILogHandler

from tasks import artifacts
from tests.end_to_end.conftest import CommandLine, wait_until
from tests.made_mlflow import mlflow_server
from tests.made_models import MadeModels
from virnuc_core import env_config

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module", autouse=True)
def _fast_runs() -> None:
    """Overrides the fixture: plots are drawn here, and lanes are spawned."""


def test_a_run_is_found_again_in_mlflow_and_in_prefect(
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = f"sqlite:///{tmp_path}/tracking.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.setenv("VIRNUC_PREDICT_DNABERT_ENGINE", "reference")
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    settings = tmp_path / "settings.toml"
    settings.write_text("[defaults]\nshard-seconds = 0.001\n")
    command = ("--config", settings, "predict", contigs, "--out", tmp_path / "run", *models.flags)
    document = virnuc.done(*command, "--token-budget", "300", "--json").document

    assert document["shards"]["total"] > 1
    origins = document["settings_from"]
    assert origins["shard-seconds"] == f"{settings} [defaults]"
    assert origins["dnabert-engine"] == "environment variable VIRNUC_PREDICT_DNABERT_ENGINE"
    assert origins["token-budget"] == "flag --token-budget"
    assert "precision" not in origins
    names = ("family", "precision", "engine", "attention", "compiled", "token_budget")
    assert [tuple(model[name] for name in names) for model in document["models"]] == [
        ("dnabert_s", "fp32", "reference", "reference", False, 1),
        ("esm2", "fp32", "packed", "sdpa", False, 300),
    ]

    client = MlflowClient(uri)
    run = client.get_run(document["links"]["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    expected = {"esm2_model": "esm2", "esm2_precision": "fp32", "dnabert_s_embedding_dim": "96"}
    assert {**run.data.params, **expected, "mode": "local"} == run.data.params
    metrics = run.data.metrics
    assert metrics["rejected"] == 1
    assert 0 < metrics["esm2_packing_efficiency"] <= 1
    assert metrics["residues_per_second"] > 0
    assert metrics["progress/shards"] == document["shards"]["total"]
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.digest == document["inputs"][0]["sha256"][:36]
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"predictions.tsv", "contigs.tsv", "report.html", "run.json"} <= files
    assert {"lanes.tsv", "p_virus.png", "throughput.png"} <= files
    assert "contigs called virus" in run.data.tags["mlflow.note.content"]
    (lane,) = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'")
    assert lane.info.status == "FINISHED"
    assert lane.data.metrics["shards"] == document["shards"]["total"]

    asyncio.run(APILogHandler.aflush())
    with get_client(sync_client=True) as prefect:
        check_prefect(prefect, UUID(run.data.tags["prefect.flow_run_id"]), run.info.run_id)


def check_prefect(client: SyncPrefectClient, flow_run_id: UUID, mlflow_run_id: str) -> None:
    """State, name and tags of the flow run; artifacts and log lines of it and of its lane."""

    def filtered(kind: Any, run_id: UUID) -> Any:
        return kind.model_validate({"flow_run_id": {"any_": [run_id]}})

    def shown(run_id: UUID) -> dict[str | None, object]:
        found = client.read_artifacts(artifact_filter=filtered(ArtifactFilter, run_id))
        return {artifact.key: artifact.data for artifact in found}

    def lines(run_id: UUID) -> list[str]:
        return [log.message for log in client.read_logs(filtered(LogFilter, run_id))]

    flow_run = client.read_flow_run(flow_run_id)
    assert flow_run.state_name == "Completed"
    assert "contigs.fa" in flow_run.name
    assert f"mlflow:{mlflow_run_id}" in flow_run.tags
    children = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [flow_run_id]}})
    (lane,) = client.read_flow_runs(flow_run_filter=children)
    assert shown(flow_run_id).keys() == {"virnuc-summary", "virnuc-lanes", "virnuc-packing"}
    assert mlflow_run_id in str(shown(flow_run_id)["virnuc-summary"])
    assert shown(lane.id) == {"virnuc-lane-0": 100.0}
    assert any(line.startswith("plan: esm2") for line in lines(flow_run_id))
    assert any(line.startswith("lane 0: shard 1 of ") for line in lines(lane.id))


def test_a_store_that_cannot_be_written_costs_no_result(
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run / "run.json").unlink()
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/tracking.db")
    env_config.reload()
    result = virnuc.done("predict", contigs, "--out", run, *models.flags)
    assert (run / "run.json").exists()
    assert result.err.count("warning: MLflow") == 1


@pytest.mark.slow
def test_a_server_that_goes_away_during_a_run_has_all_of_it_later_and_once(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, set_env: Callable[..., None]
) -> None:
    root = tmp_path / "run"
    command = ("predict", contigs, "--out", root, *models.flags, "--shard-seconds", 0.001, "--json")
    with mlflow_server(tmp_path) as server:
        set_env(MLFLOW_TRACKING_URI=server.url, VIRNUC_HOME=tmp_path / "home")

        def stop() -> None:
            wait_until(lambda: list(root.glob("shards/*.h5")))
            server.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        result = virnuc.done(*command)
        thread.join()
        assert result.err.count("MLflow") == 1
        assert virnuc("track", root).code == 6
        server.start()
        assert virnuc.done("track", root, "--json").document == {"completed": 1, "left": 0}
        assert virnuc.done("track", "--json").document == {"completed": 0, "left": 0}

        client = MlflowClient(server.url)
        experiment = client.get_experiment_by_name("virnuc")
        runs = client.search_runs([experiment.experiment_id])
        assert [run.info.status for run in runs] == ["FINISHED"] * 2
        (run,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
        shards = result.document["shards"]["total"]
        assert len(client.get_metric_history(run.info.run_id, "progress/shards")) == shards
        assert run.data.metrics["contigs_virus"] == result.document["counts"]["contigs_virus"]
        files = {file.path for file in client.list_artifacts(run.info.run_id)}
        assert {"contigs.tsv", "run.json", "lanes.tsv", "p_virus.png", "throughput.png"} <= files
    assert not (root / "tracking").exists()
