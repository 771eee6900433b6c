import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks import tracking
from tasks.tracking import tracked_run
from virnuc_core import env_config
from virnuc_core.env_config import env


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all tests: a new database takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_HOME", str(home))
    env_config.reload()


def own_store() -> MlflowClient:
    return MlflowClient(f"sqlite:///{env().home / 'mlflow.db'}")


def test_run_is_kept_in_virnucs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MAX_ARTIFACT_BYTES", 10)
    small, large = tmp_path / "small.tsv", tmp_path / "large.tsv"
    small.write_text("1234567890")
    large.write_text("12345678901")
    with tracked_run("sample", {"precision": "fp32", "head": None}, {"prefect.flow_run_id": "1"}) as run:
        run.log_metrics({"frames": 3})
        run.log_files([small, large])
        run_id = run.links["mlflow_run_id"]
    kept = own_store().get_run(run_id)
    assert kept.info.run_name == "sample"
    assert kept.info.status == "FINISHED"
    assert kept.data.params == {"precision": "fp32", "head": "None"}
    assert kept.data.metrics == {"frames": 3.0}
    assert kept.data.tags["prefect.flow_run_id"] == "1"
    assert [file.path for file in own_store().list_artifacts(run_id)] == ["small.tsv"]
    assert (env().home / "mlartifacts").is_dir()


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_status_is_that_of_the_run(error: type[BaseException], status: str) -> None:
    run_ids = []

    def failing_run() -> None:
        with tracked_run("sample", {}, {}) as run:
            run_ids.append(run.links["mlflow_run_id"])
            raise error

    with pytest.raises(error):
        failing_run()
    assert own_store().get_run(run_ids[0]).info.status == status


def test_store_that_fails_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file"))
    env_config.reload()
    with caplog.at_level(logging.WARNING), tracked_run("sample", {"a": 1}, {}) as run:
        run.log_metrics({"frames": 3})
        run.log_files([Path("none")])
        assert run.links == {}
    assert len([record for record in caplog.records if record.name == "tasks.tracking"]) == 1


def test_error_of_virnuc_is_not_hidden() -> None:
    with pytest.raises(AttributeError), tracked_run("sample", {}, {}) as run:
        run.log_metrics(None)  # type: ignore[arg-type]
