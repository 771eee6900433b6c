"""Runs without a Prefect server: the same results and records as those of a flow, by real processes."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.end_to_end.conftest import virnuc_process, wait_until
from tests.made_models import MadeModels
from virnuc_cli.local_prefect import has_server
from virnuc_core import env_config

OWN = {"run.json", "report.html", "virnuc_mqc.json", "lanes", "shards", "frames"}  # with times, or folders


@dataclass(frozen=True)
class Recorded:
    """What a run left: its result files, run.json, and runs in MLflow by name."""

    files: Mapping[str, bytes]
    document: Mapping[str, object]
    runs: Mapping[str, Run]
    artifacts: set[str]


def computed(home: Path, *arguments: object) -> Recorded:
    """Runs `virnuc predict` with a home of its own and no server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"VIRNUC_HOME": str(home), "HOME": str(home)}
    command = [
        sys.executable,
        "-m",
        "virnuc_cli",
        "predict",
        *map(str, arguments),
        "--out",
        str(home / "run"),
    ]
    home.mkdir()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = home / "run"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in OWN}
    files |= {path.name: path.read_bytes() for path in (folder / "shards").iterdir()}
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("virnuc")
    assert experiment is not None
    runs = {str(run.info.run_name): run for run in client.search_runs([experiment.experiment_id])}
    document = json.loads((folder / "run.json").read_bytes())
    artifacts = client.list_artifacts(document["links"]["mlflow_run_id"])
    return Recorded(files, document, runs, {artifact.path for artifact in artifacts})


@pytest.mark.slow
def test_a_run_without_prefect_leaves_what_a_flow_leaves(
    models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    arguments = (contigs, *models.flags, "--shard-seconds", "0.001", "--project", "ocean")
    direct = computed(tmp_path / "direct", *arguments)
    flow = computed(tmp_path / "flow", *arguments, "--prefect")
    assert direct.document["run_as"] == "process"
    assert flow.document["run_as"] == "flow"
    assert direct.document.keys() == flow.document.keys()
    assert direct.files == flow.files
    assert len(direct.files) > 15

    assert direct.artifacts == flow.artifacts
    assert direct.runs.keys() == flow.runs.keys()
    assert len(direct.runs) == 2  # the run and its lane
    for name, run in direct.runs.items():
        other = flow.runs[name]
        assert run.info.status == other.info.status == "FINISHED"
        assert run.data.params == other.data.params
        assert run.data.metrics.keys() == other.data.metrics.keys()
        of_flow = {tag for tag in other.data.tags if not tag.startswith("prefect.")}
        assert run.data.tags.keys() == of_flow
    assert any(tag.startswith("prefect.") for run in flow.runs.values() for tag in run.data.tags)


@pytest.mark.slow
def test_a_killed_run_goes_on(models: MadeModels, contigs: Path, tmp_path: Path) -> None:
    arguments = ("predict", contigs, *models.flags, "--engine", "reference", "--shard-seconds", "0.0001")
    out = tmp_path / "run"
    with virnuc_process(*arguments, "--out", out) as process:
        wait_until(lambda: any((out / "shards").glob("shard_*.h5")))
        process.kill()
    left = {path: path.stat().st_mtime_ns for path in (out / "shards").glob("shard_*.h5")}
    with virnuc_process(*arguments, "--out", out) as process:
        assert process.wait(120) == 0
    shards = json.loads((out / "run.json").read_bytes())["shards"]
    assert shards["computed"] == shards["total"] - len(left)
    assert {path: path.stat().st_mtime_ns for path in left} == left
    assert sorted(path.suffix for path in (out / "lanes").iterdir()) == [".jsonl", ".jsonl", ".log", ".log"]
    assert not (out / "tracking").exists()


def test_a_server_is_one_that_prefect_would_use(tmp_path: Path) -> None:
    """Prefect itself is asked only if something could name a server: its import takes longer than a small run."""
    code = "import sys; from virnuc_cli.local_prefect import has_server; print(has_server(), 'prefect' in sys.modules)"

    def asked(**variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment = {**kept, "HOME": str(tmp_path), "VIRNUC_HOME": str(tmp_path / "home"), **variables}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert asked() == "False False"
    assert asked(PREFECT_API_URL="http://127.0.0.1:9/api") == "True False"
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:9/api"\n')
    assert asked() == "True True"
    (tmp_path / "prefect.toml").unlink()
    profiles = tmp_path / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    text = 'active = "{}"\n[profiles.none]\n[profiles.own]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    profiles.write_text(text.format("own"))
    assert asked() == "True True"
    profiles.write_text(text.format("none"))
    assert asked() == "False True"


def test_a_server_of_this_process_counts(prefect_server: None) -> None:
    env_config.reload()
    assert has_server()


def test_a_run_takes_no_module_from_its_working_folder_and_makes_a_private_home_folder(
    models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    folder, home = tmp_path / "data", tmp_path / "home"
    folder.mkdir()
    for name in ("pickle", "random", "socket"):
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    command = ("-P", "-m", "virnuc_cli", "predict", contigs, *models.flags, "--out", "run")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**environment, "VIRNUC_HOME": str(home), "HOME": str(tmp_path)},
        cwd=folder,
        umask=0,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("ran-*")) == []
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "mlflow.db").stat().st_mode) == 0o600
