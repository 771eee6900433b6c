import json
import logging
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks import tracking
from tasks.tracking import MetricPoint, tracked_run
from virnuc_core import env_config
from virnuc_core.env_config import env
from virnuc_core.specs import InputFile


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests: a new database takes seconds."""
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
    experiment = own_store().get_experiment(kept.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


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


def test_store_that_fails_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file"))
    env_config.reload()
    with caplog.at_level(logging.WARNING), tracked_run("sample", {"a": 1}, {}) as run:
        run.log_metrics({"frames": 3})
        run.log_files([Path("none")])
        run.log_table("table", [{"a": 1}])
        run.describe("text")
        assert run.child("lane", {}, {}).run_id is None
        assert run.links == {}
    assert [record.name for record in caplog.records] == ["tasks.tracking"]


def test_store_is_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_TRIALS", 1.0)
    with caplog.at_level(logging.WARNING), tracked_run("sample", {}, {}) as run:
        run.log_files([tmp_path / "none"])  # any failure will do
        run.log_metrics({"during": 1})
        time.sleep(1.1)
        run.log_metrics({"after": 1})
        run.log_files([tmp_path / "none"])
    kept = own_store().get_run(str(run.run_id))
    assert kept.info.status == "FINISHED"  # written even if the store has just failed
    assert kept.data.metrics == {"after": 1}
    assert len(caplog.records) == 1


def test_run_opened_inside_another_is_a_part_of_it() -> None:
    with tracked_run("nightly", {}, {}) as nightly:
        with tracked_run("first", {}, {}) as first:
            lane = first.child("lane", {"device": "cpu"}, {"a": "b"}, start_time=12.5)
            lane.finish("FAILED", at=13.0)
        with tracked_run("second", {}, {}) as second:
            pass
    with tracked_run("later", {}, {}) as later:
        pass
    parents = [
        own_store().get_run(str(run.run_id)).data.tags.get("mlflow.parentRunId")
        for run in (nightly, first, lane, second, later)
    ]
    assert parents == [None, nightly.run_id, first.run_id, nightly.run_id, None]
    info = own_store().get_run(str(lane.run_id)).info
    assert (info.status, info.start_time, info.end_time) == ("FAILED", 12_500, 13_000)


def test_run_inside_one_that_could_not_be_opened_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = env().home
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file"))
    env_config.reload()
    with tracked_run("nightly", {}, {}):
        monkeypatch.setenv("VIRNUC_HOME", str(home))
        env_config.reload()
        with tracked_run("first", {}, {}) as first:
            pass
    assert own_store().get_run(str(first.run_id)).info.status == "FINISHED"


def test_more_figures_than_a_request_may_hold() -> None:
    points = [MetricPoint(key="x", value=i, step=i, time=100.0 + i) for i in range(2100)]
    with tracked_run("sample", {}, {}) as run:
        run.log_points(points)
    assert len(own_store().get_metric_history(str(run.run_id), "x")) == 2100


def test_inputs_are_datasets_with_their_digest(tmp_path: Path) -> None:
    file = InputFile(name="sample.fa", size=5, sha256="0123456789abcdef" * 4)
    with tracked_run("sample", {}, {}) as run:
        run.log_inputs([file], [str(tmp_path / "sample.fa")])
    (found,) = own_store().get_run(str(run.run_id)).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("sample.fa", file.sha256[:36])
    assert json.loads(found.dataset.source) == {"uri": str(tmp_path / "sample.fa")}
    assert json.loads(found.dataset.profile)["sha256"] == file.sha256


def test_table_and_text_are_kept(tmp_path: Path) -> None:
    with tracked_run("sample", {}, {}) as run:
        run.log_table("lanes", [{"lane": 0, "host": "a\tb\nc"}, {"lane": 1, "tokens": 2.5}])
        run.describe("# verdict")
    path = own_store().download_artifacts(str(run.run_id), "lanes.tsv", str(tmp_path))
    assert Path(path).read_text() == "lane\thost\ttokens\n0\ta b c\t\n1\t\t2.5\n"
    assert own_store().get_run(str(run.run_id)).data.tags["mlflow.note.content"] == "# verdict"


@pytest.mark.parametrize(
    ("uri", "page"),
    [
        ("http://user:secret@mlflow.example:5000/", "http://mlflow.example:5000/#/experiments/"),
        ("https://mlflow.example/tracking", "https://mlflow.example/tracking/#/experiments/"),
    ],
)
def test_link_holds_no_password(monkeypatch: pytest.MonkeyPatch, uri: str, page: str) -> None:
    with tracked_run("sample", {}, {}) as run:
        assert list(run.links) == ["mlflow_run_id"]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        env_config.reload()
        url = run.links["mlflow_run_url"]
    assert url.startswith(page)
    assert url.endswith(f"/runs/{run.run_id}")


def test_error_of_virnuc_is_not_hidden() -> None:
    with pytest.raises(AttributeError), tracked_run("sample", {}, {}) as run:
        run.log_metrics(None)  # type: ignore[arg-type]


def test_a_file_becomes_the_next_version_of_a_model(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    for content in ("first", "second"):
        head.write_text(content)
        with tracked_run("sample", {}, {}) as run:
            run.register_model("heads-made", head, {"sha256": content}, "# made")
    versions = own_store().search_model_versions("name='heads-made'")
    assert {int(version.version): version.tags["sha256"] for version in versions} == {1: "first", 2: "second"}
    (newest,) = [version for version in versions if int(version.version) == 2]
    assert newest.description == "# made"
    path = own_store().download_artifacts(str(run.run_id), "model/head.safetensors", str(tmp_path / "."))
    assert Path(path).read_text() == "second"
