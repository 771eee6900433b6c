"""What run.json, MLflow and Prefect record of a run, and that a run does not depend on MLflow."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, LogFilter
from prefect.logging.handlers import APILogHandler

from flows.on_demand import predict
from tasks import artifacts
from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels
from virnuc_core import __version__
from virnuc_core.errors import InputError, UsageError
from virnuc_core.settings import PredictSettings

SetEnv = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _fast_runs() -> None:
    """Overrides the fixture: lanes are spawned here."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shared by all tests: a new database takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/tracking.db"


@pytest.fixture
def client(store: str, set_env: SetEnv, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MlflowClient:
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the files of a store without a server
    set_env(MLFLOW_TRACKING_URI=store)
    return MlflowClient(store)


def runs_in(client: MlflowClient, out: Path) -> list[Run]:
    """MLflow's runs of a run folder."""
    experiment = client.get_experiment_by_name("virnuc")
    return list(client.search_runs([experiment.experiment_id], f"tags.`virnuc.out` = '{out.resolve()}'"))


def test_a_run_is_logged_once_with_what_was_resolved(
    client: MlflowClient, virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ("predict", contigs, "--out", out, *models.flags, "--dnabert-engine", "reference", "--json")
    document = virnuc.done(*command).document
    (first,) = runs_in(client, out)
    for _ in range(2):
        assert virnuc.done("server", "track", out, "--json").document == {"logged": ["predict contigs.fa"]}
    (run,) = runs_in(client, out)
    assert run.data.to_dictionary() == first.data.to_dictionary()
    assert run.info.status == "FINISHED"
    expected = {"esm2_model": "esm2", "esm2_precision": "fp32", "dnabert_s_engine": "reference"}
    assert {**run.data.params, **expected, "dnabert_s_embedding_dim": "96"} == run.data.params
    assert not {"None", "auto", ""} & {*run.data.params.values()}
    metrics = run.data.metrics
    assert metrics["contigs_virus"] == document["counts"]["contigs_virus"]
    assert metrics["rejected"] == 1
    assert 0 < metrics["wall_sequences_per_second"] < metrics["sequences_per_second"]
    assert 0 < metrics["esm2_packing_efficiency"] <= 1
    assert len(client.get_metric_history(run.info.run_id, "sequences")) == 1
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.digest == document["inputs"][0]["sha256"][:36]
    assert "contigs: " in run.data.tags["mlflow.note.content"]
    assert run.data.tags["mlflow.source.name"] == f"virnuc {__version__}"
    assert client.list_artifacts(run.info.run_id) == []
    again = virnuc.done(*command).document
    assert again["id"] != document["id"]
    assert len(runs_in(client, out)) == 2


def test_a_flow_is_found_again_in_mlflow_and_in_prefect(
    client: MlflowClient,
    prefect_server: None,
    models: MadeModels,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    out = tmp_path / "run"
    report = predict([str(contigs)], str(out), chosen(models))
    (run,) = runs_in(client, out)
    assert run.info.status == "FINISHED"
    assert run.data.tags["virnuc.mode"] == "local"
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"chunks.tsv", "contigs.tsv", "report.html", "run.json", "lanes.tsv"} <= files
    lanes = Path(client.download_artifacts(run.info.run_id, "lanes.tsv", str(tmp_path))).read_text()
    assert lanes.splitlines()[1].split("\t")[4] == str(len(report.plan.shards))
    asyncio.run(APILogHandler.aflush())
    with get_client(sync_client=True) as prefect:
        check_prefect(prefect, UUID(run.data.tags["prefect.flow_run_id"]))


def test_a_flow_that_fails_has_failed_in_mlflow(
    client: MlflowClient, prefect_server: None, models: MadeModels, tmp_path: Path
) -> None:
    empty, out = tmp_path / "empty.fa", tmp_path / "run"
    empty.write_text(">a\nQQQQQQ\n")
    with pytest.raises(InputError):
        predict([str(empty)], str(out), chosen(models))
    assert [run.info.status for run in runs_in(client, out)] == ["FAILED"]


def chosen(models: MadeModels) -> PredictSettings:
    flags = dict(zip(models.flags[::2], models.flags[1::2], strict=True))
    named = {name.lstrip("-").replace("-", "_"): str(value) for name, value in flags.items()}
    return PredictSettings.model_validate({**named, "shard_seconds": 0.001})


def check_prefect(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """State and name of the flow run; artifacts and log lines of it, also those of its lane."""

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
    assert shown(flow_run_id).keys() == {"virnuc-summary", "virnuc-lanes", "virnuc-lane-0"}
    page = str(shown(flow_run_id)["virnuc-summary"])
    assert page.startswith("# 6 contigs: ")
    assert "/run/report.html`" in page
    assert "| ESM-2 esm2 | 96 | fp32, packed engine, sdpa attention | " in page
    assert shown(flow_run_id)["virnuc-lane-0"] == 100.0
    assert any(line.startswith("plan: esm2") for line in lines(flow_run_id))
    assert any(line.startswith("lane 0 on cpu: ") for line in lines(flow_run_id))


@pytest.mark.parametrize("kind", ["no server", "silent server", "no database"])
def test_a_store_that_cannot_be_written_costs_no_result_and_little_time_and_gets_the_run_later(
    kind: str,
    store: str,
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    run: Path,
    tmp_path: Path,
    set_env: SetEnv,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    database = f"sqlite:///{tmp_path}/file/tracking.db"
    (run / "run.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        addresses = {
            "no server": "http://127.0.0.1:9",
            "silent server": silent_server,
            "no database": database,
        }
        set_env(MLFLOW_TRACKING_URI=addresses[kind])
        begin = time.monotonic()
        result = virnuc.done("predict", contigs, "--out", run, *models.flags)
        assert time.monotonic() - begin < 45
        assert (run / "run.json").exists()
        assert result.err.count("warning: MLflow") == 1
        assert f"`virnuc server track {run}`" in result.err
        virnuc.refused(6, "MLflow", "server", "track", run)
    set_env(MLFLOW_TRACKING_URI=store)
    for _ in range(2):
        virnuc.done("server", "track", run)
    assert [one.info.status for one in runs_in(MlflowClient(store), run)] == ["FINISHED"]


def test_tracking_is_switched_off(
    virnuc: CommandLine, models: MadeModels, contigs: Path, run: Path, tmp_path: Path, set_env: SetEnv
) -> None:
    set_env(VIRNUC_TRACKING="off", VIRNUC_HOME=tmp_path / "home", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert "MLflow" not in virnuc.done("predict", contigs, "--out", run, *models.flags).err
    with pytest.raises(UsageError, match="VIRNUC_TRACKING is 'no': Input should be 'on' or 'off'"):
        set_env(VIRNUC_TRACKING="no")


def test_nothing_of_a_foreign_folder_is_done_or_copied_from_elsewhere(
    client: MlflowClient, virnuc: CommandLine, run: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    document = json.loads((run / "run.json").read_text())
    document |= {"run_as": "flow", "id": "abcdef0123456789", "out": str(secret)}
    document["labels"] = {"files": str(secret)}
    (run / "run.json").write_text(json.dumps(document))
    for name in ("virus_summary.tsv", "report.html"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    virnuc.done("server", "track", run)
    tracked = next(one for one in runs_in(client, run) if one.data.tags["virnuc.run"] == "abcdef0123456789")
    files = {file.path for file in client.list_artifacts(tracked.info.run_id)}
    assert "contigs.tsv" in files
    assert not {"virus_summary.tsv", "report.html", "secret"} & files

    for broken in ({**document, "id": "x' or 1"}, {**document, "inputs": 7}, {"kind": "predict"}):
        (run / "run.json").write_text(json.dumps(broken))
        virnuc.refused(4, "is not the record of a finished run", "server", "track", run)
    (run / "run.json").unlink()
    virnuc.refused(3, "contains no finished run", "server", "track", run)
    (run / "run.json").symlink_to(secret)
    virnuc.refused(4, "is a symbolic link", "server", "track", run)
