"""Nightly runs over an inbox: each new file becomes a run, whatever else happens."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ParameterTypeError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Scheduled

from deployments.deploy import deploy
from flows.nightly import PoolFiles, nightly
from tasks import pool_runs
from tasks.nightly import Computed, NewFile, NightlyReport
from tests.end_to_end.conftest import random_dna, wait_until
from tests.end_to_end.test_pool import Worker
from tests.made_models import MadeModels
from virnuc_core import env_config
from virnuc_core.errors import UsageError
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest
from virnuc_core.settings import PredictSettings

pytestmark = pytest.mark.usefixtures("prefect_server")

OLD = 1_000_000_000.0


class Inbox:
    """An inbox and its nightly runs."""

    def __init__(self, root: Path, models: MadeModels) -> None:
        self.folder, self.out = root / "inbox", root / "out"
        self.folder.mkdir()
        self.settings = PredictSettings(
            esm_model=str(models.esm2),
            dnabert_model=str(models.dnabert),
            head=str(models.head),
            devices=("cpu",),
        )

    def put(self, name: str, content: bytes, modified: float = OLD) -> None:
        (self.folder / name).write_bytes(content)
        os.utime(self.folder / name, (modified, modified))

    def night(self, **parameters: Any) -> State[NightlyReport]:
        return nightly(str(self.folder), str(self.out), self.settings, **parameters, return_state=True)


@pytest.fixture
def inbox(tmp_path: Path, models: MadeModels) -> Inbox:
    return Inbox(tmp_path, models)


def fasta(seed: int) -> bytes:
    return f">contig_{seed}\n{random_dna(900, seed)}\n>other_{seed}\n{random_dna(1200, seed + 50)}\n".encode()


def statuses(state: State[NightlyReport]) -> dict[str, str]:
    return {outcome.path.name: outcome.status for outcome in state.result().outcomes}


def times(*paths: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in paths}


def test_a_night_computes_what_is_new_and_leaves_the_rest(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking.db")
    monkeypatch.setenv("MLFLOW_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    inbox.put("a.fa", fasta(1))
    inbox.put("copy.fna", fasta(1), modified=OLD + 1)
    inbox.put("b.fasta.gz", gzip.compress(fasta(2)), modified=OLD + 2)
    inbox.put("cut.fa.gz", gzip.compress(fasta(3))[:-100])
    inbox.put("young.fa", fasta(4), modified=time.time())
    inbox.put("notes.txt", b"not for virnuc")
    first = inbox.night(settle_seconds=3600)
    assert first.is_completed()
    assert first.message == "5 files: 1 kept, 2 done, 1 waiting, 1 rejected"
    outcomes = {"a.fa": "done", "cut.fa.gz": "rejected", "copy.fna": "kept", "b.fasta.gz": "done"}
    assert statuses(first) == {**outcomes, "young.fa": "waiting"}
    left = {"a.fa", "copy.fna", "b.fasta.gz", "young.fa", "notes.txt", "rejected"}
    assert {path.name for path in inbox.folder.iterdir()} == left
    assert "truncated" in (inbox.folder / "rejected" / "cut.fa.gz.reason.txt").read_text()
    finished = times(*inbox.out.glob("*/run.json"))
    assert sorted(path.parent.name.rpartition("-")[0] for path in finished) == ["a", "b"]
    check_records(MlflowClient(f"sqlite:///{tmp_path}/tracking.db"), first)

    os.utime(inbox.folder / "young.fa", (OLD, OLD))
    (inbox.folder / "a.fa").rename(inbox.folder / "renamed.fa")
    kept = dict.fromkeys(("renamed.fa", "copy.fna", "b.fasta.gz"), "kept")
    assert statuses(inbox.night()) == {**kept, "young.fa": "done"}
    assert times(*finished) == finished


def check_records(client: MlflowClient, state: State[NightlyReport]) -> None:
    """An MLflow run of the night, one of each file, even of a bad one, and two Prefect artifacts."""
    experiment = client.get_experiment_by_name("virnuc")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    [night] = [run for run in runs if "inbox" in run.data.params]
    assert night.info.status == "FINISHED"
    assert str(night.info.run_name).startswith("nightly inbox 20")
    assert night.data.params["lane_minutes"] == "10.0"
    assert (night.data.metrics["files_done"], night.data.metrics["contigs"]) == (2, 4)
    files = {str(run.info.run_name).split()[1]: run.info.status for run in runs if run is not night}
    assert files == {"a.fa": "FINISHED", "b.fasta.gz": "FINISHED", "cut.fa.gz": "FAILED"}

    [child] = runs_of(Path(night.data.params["inbox"]) / "a.fa")
    assert "virnuc" in child.tags
    of_run = ArtifactFilter.model_validate({"flow_run_id": {"any_": [state.state_details.flow_run_id]}})
    with get_client(sync_client=True) as prefect:
        found = prefect.read_artifacts(artifact_filter=of_run)
    artifacts = {artifact.key: str(artifact.data) for artifact in found}
    assert artifacts["virnuc-night"].startswith("# 5 files")
    assert "truncated" in artifacts["virnuc-night-files"]


def test_links_are_skipped_and_never_read(inbox: Inbox, tmp_path: Path) -> None:
    secret, linked = tmp_path / "secret", tmp_path / "linked.fa"
    secret.write_text("root:secret:19000\n")
    linked.write_bytes(fasta(1))
    for target in (secret, linked):
        os.utime(target, (OLD, OLD))
    read = os.stat(secret).st_atime_ns
    for name, target in (("a.fa", secret), ("b.fa", linked), ("c.fa", tmp_path / "nothing.fa")):
        (inbox.folder / name).symlink_to(target)
    state = inbox.night()
    assert statuses(state) == dict.fromkeys(("a.fa", "b.fa", "c.fa"), "skipped")
    assert state.message == "3 files: 3 skipped"
    of_run = ArtifactFilter.model_validate({"flow_run_id": {"any_": [state.state_details.flow_run_id]}})
    with get_client(sync_client=True) as prefect:
        shown = [str(artifact.data) for artifact in prefect.read_artifacts(artifact_filter=of_run)]
    assert all("a.fa is a link" in each and "secret:" not in each for each in shown)
    assert not any("secret:" in path.read_text(errors="replace") for path in inbox.out.iterdir())
    assert {path.name for path in inbox.folder.iterdir()} == {"a.fa", "b.fa", "c.fa"}
    assert os.stat(secret).st_atime_ns == read
    assert list(inbox.out.glob("*/")) == []


def test_failure_makes_the_night_fail_at_its_end_and_goes_on_the_next_night(inbox: Inbox) -> None:
    inbox.put("a.fa", fasta(1))
    inbox.put("b.fa", fasta(2), modified=OLD + 1)
    assert inbox.night().is_completed()
    # The first run loses its last file, and another program locks its folder.
    [run] = inbox.out.glob("a-*")
    shards = times(*(run / "shards").iterdir())
    (run / "run.json").unlink()
    inbox.put("c.fa", fasta(3), modified=OLD + 2)
    with open_run_folder(run, force=False):
        state = inbox.night()
    assert state.is_failed()
    assert "3 files: 1 kept, 1 done, 1 failed" in str(state.message)
    assert "another run" in str(state.message)
    assert (inbox.folder / "a.fa").exists()
    assert len(list(inbox.out.glob("c-*/run.json"))) == 1

    assert statuses(inbox.night()) == {"a.fa": "done", "b.fa": "kept", "c.fa": "kept"}
    assert times(*(run / "shards").iterdir()) == shards


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
        wait_until(lambda: any(inbox.out.glob("a-*/shards/*.h5")))
        process.kill()
    made = times(*inbox.out.glob("a-*/shards/*.h5"))
    assert made
    assert not list(inbox.out.glob("a-*/run.json"))

    assert statuses(inbox.night()) == {"a.fa": "done"}
    assert len(list(inbox.out.glob("a-*/shards/*.h5"))) > len(made)
    assert times(*made) == made


def test_two_nights_at_once_compute_each_file_once(inbox: Inbox) -> None:
    for number in range(3):
        inbox.put(f"{number}.fa", fasta(number), modified=OLD + number)
    inbox.put("bad.fa", b"no sequence at all\n")
    with ThreadPoolExecutor(2) as threads:
        nights = list(threads.map(lambda _: inbox.night(), range(2)))
    of_files = [statuses(night) for night in nights]
    for number in range(3):
        assert sorted(found[f"{number}.fa"] for found in of_files) == ["done", "kept"]
    assert sum(found.get("bad.fa") == "rejected" for found in of_files) == 1
    assert sorted(path.name for path in (inbox.folder / "rejected").iterdir()) == [
        "bad.fa",
        "bad.fa.reason.txt",
    ]
    assert [night.is_completed() for night in nights] == [True, True]
    assert "FilesRejected" in {night.name for night in nights}


class StandIn:
    """Takes the runs of files in the pool, and writes results instead of computing them."""

    def __init__(self) -> None:
        self.crashes_left = 0
        self.failure = ""

    def __call__(self, run: FlowRun) -> None:
        [path] = run.parameters["inputs"]
        sha256 = input_digest(path).sha256
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Running(), force=True)
            if self.crashes_left:
                self.crashes_left -= 1
                state: State[None] = Crashed(message="Process exited with -9")
            elif self.failure or b"bad" in Path(path).read_bytes():
                error = self.failure or f"InputError: {path} is truncated."
                state = Failed(message=f"Flow run encountered an exception: {error}")
            else:
                report = RunFolder(Path(run.parameters["out"])).report
                report.parent.mkdir()
                counts = {"records": 1, "contigs_virus": 0}
                report.write_text(json.dumps({"inputs": [{"sha256": sha256}], "counts": counts}))
                state = Completed()
            client.set_flow_run_state(run.id, state, force=True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    deploy()
    monkeypatch.setattr(pool_runs, "_SECONDS_BETWEEN_POLLS", 0.1)
    stand_in = StandIn()
    with Worker(stand_in):
        yield stand_in


def runs_of(path: Path) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return [run for run in runs if run.parameters.get("inputs") == [str(path)]]


@pytest.mark.usefixtures("stand_in")
def test_two_nights_in_the_pool_share_one_run_a_file(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that begins when a file has failed would try it again.
    both_have_begun, compute = Barrier(2), PoolFiles.compute

    def compute_together(self: PoolFiles, files: Iterator[NewFile]) -> Iterator[tuple[NewFile, Computed]]:
        both_have_begun.wait(timeout=60)
        return compute(self, files)

    monkeypatch.setattr(PoolFiles, "compute", compute_together)
    for number in range(8):
        content = b"bad" if number < 2 else str(number).encode()
        inbox.put(f"{number}.fa", content + str(number).encode(), modified=OLD + number)
    with ThreadPoolExecutor(2) as threads:
        nights = list(threads.map(lambda _: inbox.night(mode="pool", files_at_once=4), range(2)))
    of_files = [statuses(night) for night in nights]
    for number in range(8):
        found = sorted(one.get(f"{number}.fa", "gone") for one in of_files)
        assert found in (
            [["gone", "rejected"], ["rejected", "waiting"]] if number < 2 else [["done", "kept"]]
        )
        [run] = runs_of(inbox.folder / f"{number}.fa")
        assert "virnuc" in run.tags
        assert run.work_queue_name == "normal"
    reasons = inbox.folder / "rejected"
    assert len(list(reasons.glob("*.reason.txt"))) == len(list(reasons.glob("?.fa"))) == 2


def test_a_failed_run_of_a_file_does_not_block_the_next_night(inbox: Inbox, stand_in: StandIn) -> None:
    inbox.put("a.fa", b"one")
    stand_in.failure = "DeviceMemoryError: the GPU is full."
    night = inbox.night(mode="pool")
    assert night.is_failed()
    assert "a.fa: DeviceMemoryError: the GPU is full." in str(night.message)
    stand_in.failure, stand_in.crashes_left = "", 2
    assert statuses(inbox.night(mode="pool")) == {"a.fa": "done"}
    assert sorted(run.state_name or "" for run in runs_of(inbox.folder / "a.fa")) == [
        "Completed",
        "Crashed",
        "Crashed",
        "Failed",
    ]


def test_a_run_that_crashes_again_and_again_fails_its_file(inbox: Inbox, stand_in: StandIn) -> None:
    inbox.put("a.fa", b"one")
    stand_in.crashes_left = 99
    night = inbox.night(mode="pool")
    assert night.is_failed()
    assert "Process exited with -9" in str(night.message)
    assert len(runs_of(inbox.folder / "a.fa")) == 3


def test_a_night_that_ends_early_cancels_its_own_runs_alone(inbox: Inbox) -> None:
    deploy()
    new = NewFile(path=inbox.folder / "a.fa", sha256="1" * 64, results=inbox.out / "a")

    @flow
    def interrupted(files: list[NewFile]) -> None:
        def end() -> Iterator[NewFile]:
            yield from files
            raise KeyboardInterrupt

        parameters = {"settings": inbox.settings, "priority": "bulk"}
        list(PoolFiles(inbox.out, parameters, files_at_once=9).compute(end()))

    with pytest.raises(KeyboardInterrupt):
        interrupted([new])
    [own] = runs_of(inbox.folder / "a.fa")
    assert own.state_type == StateType.CANCELLED
    with get_client(sync_client=True) as client:
        # As if another night had begun it.
        client.set_flow_run_state(own.id, Scheduled(), force=True)
        with pytest.raises(KeyboardInterrupt):
            interrupted([new])
        assert client.read_flow_run(own.id).state_type == StateType.SCHEDULED
        client.set_flow_run_state(own.id, Cancelled(), force=True)


def test_a_night_with_nothing_to_do_and_one_that_cannot_begin(inbox: Inbox) -> None:
    assert inbox.night().message == "no files in the inbox"
    inbox.put("a.fa", fasta(1))
    wrong: dict[str, object] = {"settle_seconds": -1.0, "files_at_once": 0, "mode": "cloud"}
    for name, value in wrong.items():
        with pytest.raises(ParameterTypeError, match=name):
            nightly(str(inbox.folder), str(inbox.out), **{name: value})
    shutil.rmtree(inbox.folder)
    with pytest.raises(UsageError, match="inbox"):
        inbox.night().result()
