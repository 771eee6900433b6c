"""Runs in MLflow's store, and what happens when it fails."""

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks import mlflow_store, publishing, run_record
from tasks.publishing import run_tags
from tasks.tracking import MetricPoint, TrackedRun, tracked_run
from tests.made_storage import object_storage
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


def test_run_is_kept_in_virnucs_home(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_store, "MAX_ARTIFACT_BYTES", 10)
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


@pytest.fixture
def unusable(tmp_path: Path, set_env: SetEnv) -> Path:
    """A store that cannot be used until this file is deleted."""
    (tmp_path / "late").touch()
    set_env(MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/late/mlflow.db", VIRNUC_HOME=tmp_path / "own")
    return tmp_path / "late"


def store_of(file: Path) -> MlflowClient:
    file.unlink(missing_ok=True)
    file.mkdir(exist_ok=True)
    return MlflowClient(f"sqlite:///{file}/mlflow.db")


def runs_of(client: MlflowClient) -> dict[str, Run]:
    experiment = client.get_experiment_by_name("virnuc")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def record(folder: Path, name: str = "sample") -> None:
    with tracked_run(name, {"a": 1}, {}, folder) as run:
        run.log_metrics({"frames": 3})
        run.log_table("table", [{"a": 1}])
        lane = run.child("lane of " + name, {}, {}, start_time=12.5)
        lane.log_metrics({"frames": 2}, at=13.0)
        lane.finish("FAILED", at=14.0)


def check(runs: Mapping[str, Run], name: str = "sample") -> None:
    run, lane = runs[name], runs[f"lane of {name}"]
    assert (run.info.status, lane.info.status) == ("FINISHED", "FAILED")
    assert (run.data.params, run.data.metrics) == ({"a": "1"}, {"frames": 3.0})
    assert lane.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert (lane.info.start_time, lane.info.end_time) == (12_500, 14_000)


def test_what_the_store_does_not_take_is_kept_and_written_later(
    unusable: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with caplog.at_level(logging.WARNING):
        record(folder)
    assert [line.name for line in caplog.records] == ["tasks.run_record"]
    client = store_of(unusable)
    record(folder, "next")
    runs = runs_of(client)
    assert len(runs) == 4
    check(runs)
    check(runs, "next")
    assert [file.path for file in client.list_artifacts(runs["sample"].info.run_id)] == ["table.tsv"]
    assert not (folder / "tracking").exists()
    assert not list((tmp_path / "own" / "tracking").iterdir())


def test_a_home_completes_the_runs_of_other_folders(unusable: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record(tmp_path / "run")
    client = store_of(unusable)
    with tracked_run("other", {}, {}) as run:
        assert run.run_id
        check(runs_of(client))


def test_a_record_goes_to_the_store_that_it_was_for(
    unusable: Path, tmp_path: Path, set_env: SetEnv, client: MlflowClient
) -> None:
    record(tmp_path)
    set_env(MLFLOW_TRACKING_URI=client.tracking_uri)
    record(tmp_path, "elsewhere")
    assert "lane of sample" not in runs_of(client)
    assert run_record.complete_records([tmp_path / "tracking"]) == (0, 1)
    later = store_of(unusable)
    set_env(MLFLOW_TRACKING_URI=later.tracking_uri)
    assert run_record.complete_records([tmp_path / "tracking"]) == (1, 0)
    check(runs_of(later))


def test_a_store_that_comes_back_during_the_run_has_all_of_it_once(
    unusable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "SECONDS_BETWEEN_TRIALS", 0.0)
    with tracked_run("sample", {}, {}) as run:
        run.log_metrics({"frames": 1}, step=1)
        run.log_metrics({"frames": 2}, step=2)
        client = store_of(unusable)
        run.log_metrics({"frames": 3}, step=3)
        assert run.links
    assert len(client.get_metric_history(str(run.run_id), "frames")) == 3
    assert client.get_run(str(run.run_id)).info.status == "FINISHED"


def test_a_record_may_be_written_twice(unusable: Path, tmp_path: Path) -> None:
    """The process that writes it later may be killed at any place, also in the middle of a line."""
    record(tmp_path)
    client = store_of(unusable)
    (left,) = (tmp_path / "tracking").iterdir()
    copy = shutil.copytree(left, tmp_path / "copy" / left.name)
    for folder in (left, copy):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"run": 0, "do": "par')
        again = run_record.RunRecord.reopen(folder)
        assert again
        assert again.complete() == ""
    runs = runs_of(client)
    check(runs)
    assert len(client.search_runs([runs["sample"].info.experiment_id])) == 2
    assert len(client.get_metric_history(runs["sample"].info.run_id, "frames")) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.tracking import tracked_run
with tracked_run("killed", {}, {}, Path(sys.argv[1])) as run:
    ended = run.child("ended", {}, {})
    ended.finish("FINISHED")
    run.child("lane", {}, {})
    assert run.run_id  # waits until all of it is written
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_runs_of_a_killed_process_are_ended(client: MlflowClient, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with tracked_run("next", {}, {}, tmp_path) as run:
        assert run.run_id
        runs = runs_of(client)
        statuses = {name: runs[name].info.status for name in ("killed", "lane", "ended", "next")}
    assert statuses == {"killed": "KILLED", "lane": "KILLED", "ended": "FINISHED", "next": "RUNNING"}
    assert not (tmp_path / "tracking").exists()


def test_a_run_that_is_alive_is_left_alone(client: MlflowClient, tmp_path: Path) -> None:
    with tracked_run("first", {}, {}, tmp_path) as first:
        code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "")
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
        assert client.get_run(str(first.run_id)).info.status == "RUNNING"


def test_artifacts_that_cannot_be_stored_hold_up_nothing_else(
    tmp_path: Path, set_env: SetEnv, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with object_storage(set_env) as storage:
        client = MlflowClient(uri)
        client.create_experiment("virnuc", artifact_location=f"{storage.url}/artifacts")
        set_env(MLFLOW_TRACKING_URI=uri, MLFLOW_S3_ENDPOINT_URL=f"http://{storage.host}:{storage.port}")
        with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "boto3", None)  # as where it is not installed
            record(tmp_path)
        check(runs_of(client))
        assert "boto3" in caplog.text
        with tracked_run("next", {}, {}, tmp_path):
            pass
        assert [name.rpartition("/")[2] for name in storage.written] == ["table.tsv"]


def test_a_stopped_run_keeps_what_it_has_no_time_to_send(client: MlflowClient, tmp_path: Path) -> None:
    with tracked_run("sample", {}, {}, tmp_path) as run:
        assert run.run_id
        run._record.hurry(0.0)  # type: ignore[union-attr]
        for number in range(2000):
            run.child(f"lane {number}", {}, {}).finish("KILLED")
    assert client.get_run(str(run.run_id)).info.status == "RUNNING"
    (left,) = (tmp_path / "tracking").iterdir()
    assert len((left / "metrics.jsonl").read_text().splitlines()) == 3 * 2000 + 1
    shutil.rmtree(left)


def test_what_mlflow_refuses_is_left_out(client: MlflowClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tracked_run("sample", {"a": 1}, {}) as run:
        run.log_params({"a": 2})
        run.log_metrics({"frames": 3})
    assert client.get_run(str(run.run_id)).data.metrics == {"frames": 3.0}
    assert "refuses" in caplog.text


def test_a_figure_that_cannot_be_drawn_is_left_out(
    client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    with tracked_run("sample", {}, {}) as run:
        run.log_figure("p_virus", counts=[1, 2], threshold="high")
        run.log_figure("throughput", lanes=[("lane 0", [(1000.0, 5.0), (1060.0, 7.0)])])
        assert [file.path for file in client.list_artifacts(str(run.run_id))] == ["throughput.png"]
    assert "p_virus.png cannot be drawn" in caplog.text


def test_messages_hold_no_password(tmp_path: Path, set_env: SetEnv, caplog: pytest.LogCaptureFixture) -> None:
    set_env(MLFLOW_TRACKING_URI="http://user:secret@127.0.0.1:1")
    with caplog.at_level(logging.DEBUG), tracked_run("sample", {}, {}, tmp_path):
        pass
    assert "127.0.0.1:1" in caplog.text
    assert "secret" not in caplog.text


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
    assert run_tags(tmp_path, "ocean") == {"virnuc.out": str(tmp_path), "virnuc.project": "ocean"}
    monkeypatch.setattr(publishing, "in_flow", lambda: True)
    assert run_tags(tmp_path).get("prefect.flow_run_url") == (url if pages else None)


def test_a_file_becomes_the_next_version_of_a_model(client: MlflowClient, tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    for content in ("first", "second"):
        head.write_text(content)
        with tracked_run("sample", {}, {}) as run:
            run.register_head("heads-made", head, {"sha256": content}, "# made", features=512)
    versions = {int(found.version): found for found in client.search_model_versions("name='heads-made'")}
    assert [versions[number].tags["sha256"] for number in (1, 2)] == ["first", "second"]
    assert versions[2].description == "# made"
    path = client.download_artifacts(str(run.run_id), "model/head.safetensors", str(tmp_path / "."))
    assert Path(path).read_text() == "second"
