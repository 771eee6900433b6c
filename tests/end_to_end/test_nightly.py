"""Nights over an inbox: each new file is computed once, whatever else happens."""

import gzip
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ParameterTypeError
from prefect.flow_engine import run_flow
from prefect.states import Cancelled, Crashed, Running

from deployments.deploy import deploy
from flows import nightly as nights
from flows import pool as lane_runs
from flows.files import predict_files
from flows.lanes import embed_lane, plan_run
from flows.nightly import nightly
from flows.on_demand import predict
from tasks.inbox import NightlyReport
from tests.end_to_end.conftest import random_dna, wait_until
from tests.end_to_end.test_pool import Worker
from tests.made_models import MadeModels
from virnuc_core import env_config
from virnuc_core.errors import UsageError
from virnuc_core.inference.plan import read_plan, write_plan
from virnuc_core.results.run_opening import locking, open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import PredictSettings

pytestmark = pytest.mark.usefixtures("prefect_server")

OLD = 1_000_000_000.0


class Inbox:
    """An inbox and its nights."""

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

    def results(self, sample: str) -> Path:
        [found] = self.out.glob(f"{sample}-*")
        return found


@pytest.fixture
def inbox(tmp_path: Path, models: MadeModels) -> Inbox:
    return Inbox(tmp_path, models)


@pytest.fixture(autouse=True)
def _large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of `large` are large ones."""
    monkeypatch.setattr(nights, "SMALL_BYTES", 2500)


def fasta(seed: int) -> bytes:
    return f">contig_{seed}\n{random_dna(900, seed)}\n>other_{seed}\n{random_dna(1200, seed + 50)}\n".encode()


def large(seed: int) -> bytes:
    return fasta(seed) + fasta(seed + 1000)


def statuses(state: State[NightlyReport]) -> dict[str, str]:
    return {outcome.path.name: outcome.status for outcome in state.result().outcomes}


def times(*paths: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in paths}


def graph(state: State[Any]) -> list[tuple[str, int, int]]:
    """Label and number of parents and children of what a flow run called, in the order of its page."""
    with get_client(sync_client=True) as client:
        run = {"id": str(state.state_details.flow_run_id)}
        nodes = client.request("GET", "/flow_runs/{id}/graph-v2", path_params=run).json()["nodes"]
    return [(node["label"], len(node["parents"]), len(node["children"])) for _, node in nodes]


def test_twenty_files_three_broken_a_copy_and_then_another_threshold(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking.db")
    monkeypatch.setenv("MLFLOW_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    env_config.reload()
    names = [f"s{number}.fa" for number in range(14)]
    for number, name in enumerate(names):
        inbox.put(name, fasta(number), modified=OLD + number)
    inbox.put("big.fa.gz", large(20) + b"\n" * 2500)
    inbox.put("copy.fna", fasta(3), modified=OLD + 99)
    inbox.put("young.fa", fasta(21), modified=time.time())
    inbox.put("cut.fa.gz", gzip.compress(fasta(22))[:-100])
    inbox.put("page.fa", b"<html>")
    inbox.put("huge.fa", b"<html>" * 1000)
    inbox.put("notes.txt", b"not for virnuc")
    first = inbox.night(settle_seconds=3600)
    assert (first.name, first.is_completed()) == ("FilesRejected", True)
    assert first.message == "20 files: 1 kept, 15 done, 1 waiting, 3 rejected"
    broken = ("cut.fa.gz", "page.fa", "huge.fa")
    done = dict.fromkeys((*names, "big.fa.gz"), "done")
    assert statuses(first) == {
        **done,
        "copy.fna": "kept",
        "young.fa": "waiting",
        **dict.fromkeys(broken, "rejected"),
    }
    rejected = inbox.folder / "rejected"
    assert {path.name for path in rejected.glob("*.reason.txt")} == {f"{name}.reason.txt" for name in broken}
    assert "truncated" in (rejected / "cut.fa.gz.reason.txt").read_text()
    finished = times(*inbox.out.glob("*/run.json"))
    assert len(finished) == 15
    assert not list(inbox.out.glob(".virnuc-night-*"))
    [scan, *_, report] = sorted(graph(first), key=lambda node: -node[2])
    assert scan[0].startswith("scan")
    assert (scan[1], scan[2] > 0, report[1] > 0, report[2]) == (0, True, True, 0)
    check_records(MlflowClient(f"sqlite:///{tmp_path}/tracking.db"), first)

    for name in ("s5", "big"):
        alone, here = tmp_path / name, inbox.results(name)
        [source] = inbox.folder.glob(f"{name}.*")
        predict([str(source)], str(alone), inbox.settings)
        for path in {*RunFolder(here).results} - {*RunFolder(here).timed}:
            assert path.read_bytes() == (alone / path.name).read_bytes(), path

    os.utime(inbox.folder / "young.fa", (OLD, OLD))
    (inbox.folder / "s1.fa").rename(inbox.folder / "renamed.fa")
    assert inbox.night().message == "17 files: 16 kept, 1 done"
    inbox.settings = inbox.settings.model_copy(update={"threshold": 0.75})
    assert inbox.night().message == "17 files: 1 kept, 16 done"
    assert len(list(inbox.out.glob("*/run.json"))) == 32
    assert times(*finished) == finished


def check_records(client: MlflowClient, state: State[NightlyReport]) -> None:
    """MLflow runs of the night and of each large file, even a bad one; a Prefect artifact."""
    experiment = client.get_experiment_by_name("virnuc")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    [night] = [run for run in runs if "inbox" in run.data.params]
    assert night.info.status == "FINISHED"
    assert str(night.info.run_name).startswith("nightly inbox 20")
    assert night.data.params["lane_minutes"] == "10.0"
    assert (night.data.metrics["files_done"], night.data.metrics["contigs"]) == (15, 32)
    files = {str(run.info.run_name).split()[1]: run.info.status for run in runs if run is not night}
    assert files == {"big.fa.gz": "FINISHED", "huge.fa": "FAILED"}
    of_run = ArtifactFilter.model_validate({"flow_run_id": {"any_": [state.state_details.flow_run_id]}})
    with get_client(sync_client=True) as prefect:
        found = prefect.read_artifacts(artifact_filter=of_run)
    [table] = [artifact for artifact in found if artifact.key == "virnuc-night"]
    assert str(table.description).startswith("# 20 files")
    assert "truncated" in str(table.data)


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
    assert "a.fa is a symbolic link" in str(state.result().rows)
    assert {path.name for path in inbox.folder.iterdir()} == {"a.fa", "b.fa", "c.fa"}
    assert os.stat(secret).st_atime_ns == read
    assert list(inbox.out.glob("*/")) == []


def test_failure_makes_the_night_fail_at_its_end_and_goes_on_the_next_night(inbox: Inbox) -> None:
    for name, content in (("a.fa", fasta(1)), ("b.fa", fasta(2)), ("big.fa", large(3))):
        inbox.put(name, content)
    assert inbox.night().is_completed()
    # Runs lose their last file, and another program locks their folders.
    runs = [inbox.results(name) for name in ("a", "big")]
    shards = times(*(path for run in runs for path in (run / "shards").iterdir()))
    for run in runs:
        (run / "run.json").unlink()
    inbox.put("c.fa", fasta(4))
    with open_run_folder(runs[0], force=False), open_run_folder(runs[1], force=False):
        state = inbox.night()
    assert state.is_failed()
    assert "4 files: 1 kept, 1 done, 2 failed" in str(state.message)
    assert "a.fa: UsageError: another run is using" in str(state.message)
    assert "big.fa: UsageError: another run is using" in str(state.message)
    assert statuses(inbox.night()) == {"a.fa": "done", "b.fa": "kept", "big.fa": "done", "c.fa": "kept"}
    assert times(*shards) == shards


def test_unfinished_files_of_an_earlier_release_are_computed_anew(inbox: Inbox) -> None:
    for name, content in (("a.fa", fasta(1)), ("big.fa", large(2))):
        inbox.put(name, content)
    assert inbox.night().is_completed()
    vectors = {}
    for name in ("a", "big"):
        folder = RunFolder(inbox.results(name))
        vectors[name] = folder.embeddings.read_bytes()
        folder.report.unlink()
        write_plan(folder.plan, replace(read_plan(folder.plan), virnuc_version="0.0.9"))
    assert statuses(inbox.night()) == {"a.fa": "done", "big.fa": "done"}
    for name, content in vectors.items():
        assert RunFolder(inbox.results(name)).embeddings.read_bytes() == content


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_small_files_take_minutes(inbox: Inbox) -> None:
    inbox.settings = PredictSettings(devices=("cpu",))
    for number in range(500):
        inbox.put(f"{number}.fa", f">contig\n{random_dna(2000, number)}\n".encode(), modified=OLD + number)
    assert inbox.night().message == "500 files: 500 done"


FLOWS = {"predict-files": predict_files, "plan-run": plan_run, "embed-lane": embed_lane}


class Host:
    """Stands in for a worker; the first runs of batches die with it."""

    def __init__(self, crashes: int = 0) -> None:
        self.crashes = crashes
        self.batches: list[FlowRun] = []

    def __call__(self, run: FlowRun) -> None:
        with get_client(sync_client=True) as client:
            name = client.read_flow(run.flow_id).name
            if name == predict_files.name:
                self.batches.append(run)
                if self.crashes:
                    self.crashes -= 1
                    for state in (Running(), Crashed(message="Process exited with -9")):
                        client.set_flow_run_state(run.id, state, force=True)
                    return
        run_flow(FLOWS[name], flow_run=run, return_type="state")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    deploy()
    monkeypatch.setattr(lane_runs, "_SECONDS_BETWEEN_POLLS", 0.1)


@pytest.mark.usefixtures("pool")
def test_a_night_in_the_pool(inbox: Inbox, tmp_path: Path) -> None:
    """Small files are in one run, which is begun again when its worker dies; large ones have a run each."""
    for number in range(4):
        inbox.put(f"{number}.fa", fasta(number), modified=OLD + number)
    for number in range(2):
        inbox.put(f"big{number}.fa", large(10 + number))
    inbox.put("bad.fa", b"no sequence at all\n")
    host = Host(crashes=1)
    with Worker(host), Worker(host):
        state = inbox.night(mode="pool", files_at_once=3, priority="bulk")
    assert state.message == "7 files: 6 done, 1 rejected"
    [first, second] = host.batches
    assert (first.work_queue_name, first.name) == ("bulk", "predict 0.fa and 4 more")
    assert len(second.parameters["files"]) == 5
    assert [name for name, _, _ in graph(state) if name.startswith("predict / ")] != []
    predict([str(inbox.folder / "2.fa")], str(tmp_path / "alone"), inbox.settings)
    vectors = RunFolder(tmp_path / "alone").embeddings.read_bytes()
    assert RunFolder(inbox.results("2")).embeddings.read_bytes() == vectors

    inbox.put("9.fa", fasta(9))
    host = Host(crashes=99)
    with Worker(host):
        state = inbox.night(mode="pool")
    assert state.is_failed()
    assert "9.fa: LaneError: the run of its batch ended as Crashed: Process exited" in str(state.message)
    assert len(host.batches) == 3


@pytest.mark.usefixtures("pool")
def test_a_night_that_ends_early_cancels_its_runs(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the batch; the large file ends and interrupts the night."""
    inbox.put("a.fa", fasta(1))
    inbox.put("bad.fa", b"no sequence " * 300)
    too_late: list[FlowRun] = []

    def batches() -> list[FlowRun]:
        asked = {"name": {"any_": ["predict a.fa"]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
        with get_client(sync_client=True) as client:
            return client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(asked))

    def cancel() -> None:
        with get_client(sync_client=True) as client:
            for run in batches():
                too_late.append(run)
                client.set_flow_run_state(run.id, Cancelled(), force=True)

    timer = threading.Timer(30, cancel)

    def interrupt(*_: object) -> None:
        wait_until(batches)
        timer.start()
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.inbox.Night.settle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        inbox.night(mode="pool")
    timer.cancel()
    assert (batches(), too_late) == ([], [])


def test_a_night_with_nothing_to_do_and_one_that_cannot_begin(inbox: Inbox) -> None:
    assert inbox.night().message == "no files in the inbox"
    wrong: dict[str, object] = {"settle_seconds": -1.0, "files_at_once": 0, "mode": "cloud"}
    for name, value in wrong.items():
        with pytest.raises(ParameterTypeError, match=name):
            nightly(str(inbox.folder), str(inbox.out), **{name: value})
    with locking(inbox.out), pytest.raises(UsageError, match="another run is using"):
        inbox.night().result()
    shutil.rmtree(inbox.folder)
    with pytest.raises(UsageError, match="inbox"):
        inbox.night().result()
