"""Runs in MLflow's store, and what happens when it fails."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks import tracking
from tasks.publishing import prefect_tags
from tasks.tracking import MetricPoint, TrackedRun, tracked_run
from virnuc_core.env_config import env
from virnuc_core.specs import InputFile

SetEnv = Callable[..., None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests: a new database takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def client(home: Path, set_env: SetEnv) -> MlflowClient:
    set_env(VIRNUC_HOME=home)
    return MlflowClient(f"sqlite:///{home / 'mlflow.db'}")


@pytest.fixture
def no_home(tmp_path: Path) -> Path:
    """Where no store can be made."""
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_run_is_kept_in_virnucs_home(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "MAX_ARTIFACT_BYTES", 10)
    small, large = tmp_path / "small.tsv", tmp_path / "large.tsv"
    small.write_text("1234567890")
    large.write_text("12345678901")
    with tracked_run("sample", {"precision": "fp32", "head": None}, {"prefect.flow_run_id": "1"}) as run:
        run.log_metrics({"frames": 3})
        run.log_files([small, large])
        run.log_table("lanes", [{"lane": 0, "host": "a\tb\nc"}, {"lane": 1, "tokens": 2.5}])
        run.describe("# verdict")
        run_id = run.links["mlflow_run_id"]
    kept = client.get_run(run_id)
    assert (kept.info.run_name, kept.info.status) == ("sample", "FINISHED")
    assert kept.data.params == {"precision": "fp32", "head": "None"}
    assert kept.data.metrics == {"frames": 3.0}
    assert kept.data.tags["prefect.flow_run_id"] == "1"
    assert kept.data.tags["mlflow.note.content"] == "# verdict"
    assert [file.path for file in client.list_artifacts(run_id)] == ["lanes.tsv", "small.tsv"]
    table = Path(client.download_artifacts(run_id, "lanes.tsv", str(tmp_path)))
    assert table.read_text() == "lane\thost\ttokens\n0\ta b c\t\n1\t\t2.5\n"
    assert (env().home / "mlartifacts").is_dir()
    experiment = client.get_experiment(kept.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_status_is_that_of_the_run(client: MlflowClient, error: type[BaseException], status: str) -> None:
    runs: list[TrackedRun] = []

    def failing_run() -> None:
        with tracked_run("sample", {}, {}) as run:
            runs.append(run)
            raise error

    with pytest.raises(error):
        failing_run()
    assert client.get_run(str(runs[0].run_id)).info.status == status


def test_store_that_fails_costs_one_warning_and_not_the_runs_inside(
    client: MlflowClient, home: Path, no_home: Path, set_env: SetEnv, caplog: pytest.LogCaptureFixture
) -> None:
    set_env(VIRNUC_HOME=no_home)
    with caplog.at_level(logging.WARNING), tracked_run("nightly", {"a": 1}, {}) as run:
        run.log_metrics({"frames": 3})
        run.log_files([Path("none")])
        run.log_table("table", [{"a": 1}])
        run.describe("text")
        assert run.child("lane", {}, {}).run_id is None
        assert run.links == {}
        set_env(VIRNUC_HOME=home)
        with tracked_run("first", {}, {}) as first:
            pass
    assert [record.name for record in caplog.records] == ["tasks.tracking"]
    assert client.get_run(str(first.run_id)).info.status == "FINISHED"


def test_store_is_tried_again_after_a_while(
    client: MlflowClient, no_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = no_home.with_name("none")  # any failure will do
    with caplog.at_level(logging.WARNING), tracked_run("sample", {}, {}) as run:
        run.log_files([missing])
        run.log_metrics({"during": 1})
        run._store._open_until = 0.0  # a while later
        run.log_metrics({"after": 1})
        run.log_files([missing])
    kept = client.get_run(str(run.run_id))
    assert kept.info.status == "FINISHED"  # written even if the store has just failed
    assert kept.data.metrics == {"after": 1}
    assert len(caplog.records) == 1


def test_error_of_virnuc_is_not_hidden() -> None:
    with pytest.raises(AttributeError), tracked_run("sample", {}, {}) as run:
        run.log_metrics(None)  # type: ignore[arg-type]


def test_run_opened_inside_another_is_a_part_of_it(client: MlflowClient) -> None:
    with tracked_run("nightly", {}, {}) as nightly:
        with tracked_run("first", {}, {}) as first:
            lane = first.child("lane", {"device": "cpu"}, {"a": "b"}, start_time=12.5)
            lane.finish("FAILED", at=13.0)
        with tracked_run("second", {}, {}) as second:
            pass
    with tracked_run("later", {}, {}) as later:
        pass
    runs = [client.get_run(str(run.run_id)) for run in (nightly, first, lane, second, later)]
    parents = [run.data.tags.get("mlflow.parentRunId") for run in runs]
    assert parents == [None, nightly.run_id, first.run_id, nightly.run_id, None]
    info = runs[2].info
    assert (info.status, info.start_time, info.end_time) == ("FAILED", 12_500, 13_000)


def test_more_figures_than_a_request_may_hold(client: MlflowClient) -> None:
    points = [MetricPoint(key="x", value=i, step=i, time=100.0 + i) for i in range(1001)]
    with tracked_run("sample", {}, {}) as run:
        run.log_points(points)
    assert len(client.get_metric_history(str(run.run_id), "x")) == 1001


def test_inputs_are_datasets_with_their_digest(client: MlflowClient, tmp_path: Path) -> None:
    file = InputFile(name="sample.fa", size=5, sha256="0123456789abcdef" * 4)
    with tracked_run("sample", {}, {}) as run:
        run.log_inputs([file], [str(tmp_path / "sample.fa")])
    (found,) = client.get_run(str(run.run_id)).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("sample.fa", file.sha256[:36])
    assert json.loads(found.dataset.source) == {"uri": str(tmp_path / "sample.fa")}
    assert json.loads(found.dataset.profile)["sha256"] == file.sha256


@pytest.mark.parametrize(
    ("uri", "page"),
    [
        ("http://user:secret@mlflow.example:5000/", "http://mlflow.example:5000/#/experiments/"),
        ("https://mlflow.example/tracking", "https://mlflow.example/tracking/#/experiments/"),
    ],
)
def test_link_holds_no_password(set_env: SetEnv, uri: str, page: str) -> None:
    with tracked_run("sample", {}, {}) as run:
        assert list(run.links) == ["mlflow_run_id"]
        set_env(MLFLOW_TRACKING_URI=uri)
        url = run.links["mlflow_run_url"]
    assert url.startswith(page)
    assert url.endswith(f"/runs/{run.run_id}")


@pytest.mark.parametrize("pages", [None, "http://prefect.example"])
def test_link_is_left_out_where_a_temporary_server_has_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str | None
) -> None:
    url = f"{pages}/flow-runs/flow-run/1"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", url)
    assert prefect_tags(tmp_path).get("prefect.flow_run_url") == (url if pages else None)


def test_a_file_becomes_the_next_version_of_a_model(client: MlflowClient, tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    for content in ("first", "second"):
        head.write_text(content)
        with tracked_run("sample", {}, {}) as run:
            run.register_model("heads-made", head, {"sha256": content}, "# made")
    versions = {int(found.version): found for found in client.search_model_versions("name='heads-made'")}
    assert [versions[number].tags["sha256"] for number in (1, 2)] == ["first", "second"]
    assert versions[2].description == "# made"
    path = client.download_artifacts(str(run.run_id), "model/head.safetensors", str(tmp_path / "."))
    assert Path(path).read_text() == "second"
