"""Nightly runs over an inbox: each new file becomes a run, whatever else happens."""

import asyncio
import gzip
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.exceptions import ParameterTypeError
from prefect.settings import PREFECT_API_URL

from flows.nightly import nightly
from tasks.nightly import NightlyReport, lock_results
from tests.end_to_end.conftest import Checkpoints, random_dna
from virnuc_core import env_config
from virnuc_core.errors import UsageError
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.settings import PredictSettings

pytestmark = pytest.mark.usefixtures("prefect_server", "fast_lanes")

OLD = 1_000_000_000.0


class Inbox:
    """An inbox and its nightly runs."""

    def __init__(self, root: Path, checkpoints: Checkpoints) -> None:
        self.folder, self.out = root / "inbox", root / "out"
        self.folder.mkdir()
        self.settings = PredictSettings(
            esm_model=str(checkpoints.esm),
            dnabert_model=str(checkpoints.dnabert),
            head=str(checkpoints.head),
            devices=("cpu",),
        )

    def put(self, name: str, content: bytes, modified: float = OLD) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        os.utime(path, (modified, modified))
        return path

    def night(self) -> State[NightlyReport]:
        return nightly(str(self.folder), str(self.out), self.settings, return_state=True)


@pytest.fixture
def inbox(tmp_path: Path, checkpoints: Checkpoints) -> Inbox:
    return Inbox(tmp_path, checkpoints)


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    uri = f"sqlite:///{tmp_path}/tracking.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    return MlflowClient(uri)


def fasta(seed: int) -> bytes:
    return f">contig_{seed}\n{random_dna(900, seed)}\n>other_{seed}\n{random_dna(1200, seed + 50)}\n".encode()


def statuses(state: State[NightlyReport]) -> dict[str, str]:
    return {outcome.path.name: outcome.status for outcome in state.result().outcomes}


def test_night_computes_what_is_new_and_leaves_the_rest(inbox: Inbox, mlflow_client: MlflowClient) -> None:
    inbox.put("a.fa", fasta(1))
    inbox.put("copy.fna", fasta(1), modified=OLD + 1)
    inbox.put("b.fasta.gz", gzip.compress(fasta(2)), modified=OLD + 2)
    inbox.put("cut.fa.gz", gzip.compress(fasta(3))[:-100])
    inbox.put("young.fa", fasta(4), modified=time.time())
    inbox.put("notes.txt", b"not for virnuc")
    first = inbox.night()
    assert first.is_completed()
    assert first.message == "5 files: 1 kept, 2 done, 1 waiting, 1 rejected"
    assert statuses(first) == {
        "a.fa": "done",
        "cut.fa.gz": "rejected",
        "copy.fna": "kept",
        "b.fasta.gz": "done",
        "young.fa": "waiting",
    }
    assert {path.name for path in inbox.folder.iterdir()} == {
        *("a.fa", "copy.fna", "b.fasta.gz", "young.fa", "notes.txt", "rejected"),
    }
    assert "truncated" in (inbox.folder / "rejected" / "cut.fa.gz.reason.txt").read_text()
    finished = sorted(inbox.out.glob("*/run.json"))
    assert [path.parent.name.rpartition("-")[0] for path in finished] == ["a", "b"]

    check_tracking(mlflow_client)
    page, table = asyncio.run(artifacts(first))
    assert page.startswith("# 5 files")
    assert "truncated" in table

    os.utime(inbox.folder / "young.fa", (OLD, OLD))
    (inbox.folder / "a.fa").rename(inbox.folder / "renamed.fa")
    made = {path: path.stat().st_mtime_ns for path in finished}
    second = inbox.night()
    assert statuses(second) == {
        "renamed.fa": "kept",
        "copy.fna": "kept",
        "b.fasta.gz": "kept",
        "young.fa": "done",
    }
    assert {path: path.stat().st_mtime_ns for path in finished} == made


def check_tracking(client: MlflowClient) -> None:
    """One MLflow run per nightly run, with a child per predict run, even over a bad file that got so far."""
    experiment = client.get_experiment_by_name("virnuc")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    [night] = [run for run in runs if "inbox" in run.data.params]
    assert night.info.status == "FINISHED"
    assert night.info.run_name is not None
    assert night.info.run_name.startswith("nightly inbox 20")
    assert night.data.params["lane_minutes"] == "10.0"
    assert night.data.metrics["files_done"] == 2
    assert night.data.metrics["contigs"] == 4
    inside = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == night.info.run_id]
    assert {str(run.info.run_name).split()[1] for run in inside} == {"a.fa", "b.fasta.gz"}


async def artifacts(state: State[NightlyReport]) -> list[str]:
    run = ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id])
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=run))
    by_key = {artifact.key: str(artifact.data) for artifact in found}
    return [by_key["virnuc-night"], by_key["virnuc-night-files"]]


def test_failure_makes_the_night_fail_at_its_end_and_goes_on_the_next_night(inbox: Inbox) -> None:
    inbox.put("a.fa", fasta(1))
    inbox.put("b.fa", fasta(2), modified=OLD + 1)
    assert inbox.night().is_completed()
    # The first run loses its last files, and another program locks its folder.
    [run] = inbox.out.glob("a-*")
    shards = {path: path.stat().st_mtime_ns for path in (run / "shards").iterdir()}
    (run / "run.json").unlink()
    inbox.put("c.fa", fasta(3), modified=OLD + 2)
    with open_run_folder(run, force=False):
        state = inbox.night()
    assert state.is_failed()
    assert "3 files: 1 kept, 1 done, 1 failed" in str(state.message)
    assert "another run" in str(state.message)
    assert (inbox.folder / "a.fa").exists()
    assert len(list(inbox.out.glob("c-*/run.json"))) == 1

    again = inbox.night()
    assert statuses(again) == {"a.fa": "done", "b.fa": "kept", "c.fa": "kept"}
    assert {path: path.stat().st_mtime_ns for path in (run / "shards").iterdir()} == shards


@pytest.mark.slow
def test_killed_night_is_taken_up_by_the_next_one(inbox: Inbox) -> None:
    """Its lock is released, and its finished shards are kept."""
    records = [f">contig_{seed}\n{random_dna(3000, seed)}\n" for seed in range(60)]
    inbox.put("a.fa", "".join(records).encode())
    inbox.settings = inbox.settings.model_copy(update={"engine": "reference", "shard_seconds": 0.001})
    code = (
        "from flows.nightly import nightly; from virnuc_core.settings import PredictSettings; "
        f"settings = PredictSettings.model_validate_json({inbox.settings.model_dump_json()!r}); "
        f"nightly({str(inbox.folder)!r}, {str(inbox.out)!r}, settings)"
    )
    address = {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **address}) as process:
        deadline = time.monotonic() + 120
        while not list(inbox.out.glob("a-*/shards/*.h5")) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    made = {path: path.stat().st_mtime_ns for path in inbox.out.glob("a-*/shards/*.h5")}
    assert made
    assert not list(inbox.out.glob("a-*/run.json"))

    assert statuses(inbox.night()) == {"a.fa": "done"}
    shards = {path: path.stat().st_mtime_ns for path in inbox.out.glob("a-*/shards/*.h5")}
    assert len(shards) > len(made)
    assert {path: shards[path] for path in made} == made


def test_second_night_at_the_same_time_leaves_everything_to_the_first(inbox: Inbox) -> None:
    inbox.put("a.fa", fasta(1))
    with lock_results(inbox.out):
        state = inbox.night()
    assert state.is_completed()
    assert "another nightly run is at work" in str(state.message)
    assert not list(inbox.out.glob("a-*"))


def test_empty_inbox_is_a_night_too_and_a_missing_one_is_refused(inbox: Inbox) -> None:
    assert inbox.night().message == "no files in the inbox"
    shutil.rmtree(inbox.folder)
    with pytest.raises(UsageError, match="inbox"):
        inbox.night().result()


@pytest.mark.parametrize(
    ("name", "value"), [("settle_seconds", -1.0), ("lane_minutes", 0.0), ("mode", "cloud")]
)
def test_wrong_parameter_is_refused_with_its_name(inbox: Inbox, name: str, value: object) -> None:
    with pytest.raises(ParameterTypeError, match=name):
        nightly(str(inbox.folder), str(inbox.out), **{name: value})
