"""Runs from a plain shell: submitting, monitoring and results."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Scheduled

from deployments.deploy import FILES
from tests.end_to_end.conftest import wait_until, write_class
from tests.production.conftest import (
    LANE_MINUTES,
    ON_GPUS,
    SETTINGS,
    Stack,
    lane_events,
    same_results,
    shards_done,
)
from virnuc_core.inference.events import LaneStarted
from virnuc_core.inference.plan import read_plan
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.slow


def num_runs(stack: Stack) -> int:
    deployment = stack.client.read_deployment_by_name("predict/on-demand").id
    wanted = FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment]}})
    return len(stack.client.read_flow_runs(flow_run_filter=wanted))


def run_in_shell(stack: Stack, deployment: str, key: str, **values: object) -> FlowRun:
    """Runs a deployment to its end, and finds its run by one of its parameters."""
    params = [f"--param={name}={json.dumps(value)}" for name, value in values.items()]
    asked = stack.shell("prefect", "deployment", "run", deployment, *params, "--watch")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    [run] = [run for run in stack.client.read_flow_runs() if run.parameters.get(key) == values[key]]
    return run


def test_pool_of_two_workers_gives_the_bytes_of_a_local_run(
    stack: Stack, genomes: Path, local_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    values = {"inputs": [str(genomes)], "settings": SETTINGS, "lane_minutes": LANE_MINUTES, "out": str(out)}
    run = run_in_shell(stack, "predict/on-demand", "out", **values)
    assert same_results(local_run, out)
    assert sorted(shards_done(out)) == list(range(len(read_plan(RunFolder(out).plan).shards)))
    lanes = lane_events(out, LaneStarted)
    assert len(lanes) > 1
    assert sorted(lane.lane for lane in lanes) == list(range(len(lanes)))
    assert {lane.device for lane in lanes} == ({"cuda:0", "cuda:1"} if ON_GPUS else {"cpu"})

    assert run.name.startswith("predict genomes.fa tiny ")
    of_lanes = stack.lanes(run.id)
    names = [f"genomes.fa lane {number + 1} of {len(lanes)}" for number in range(len(lanes))]
    assert sorted(child.name.partition(", ")[0] for child in of_lanes) == sorted(names)
    assert len(stack.children(run.id)) == len(of_lanes) + 1  # and the plan
    assert len({child.labels["prefect.worker.name"] for child in of_lanes}) <= 2
    graph = stack.client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": run.id}).json()
    assert any(node["parents"] for _, node in graph["nodes"]), graph
    assert {"virnuc-lanes", "virnuc-summary"} <= artifacts(stack, run.id)
    assert all(artifacts(stack, child.id) for child in of_lanes)

    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, stack.access[name])
    mlflow = MlflowClient(f"http://127.0.0.1:{stack.mlflow_port}")
    experiment = mlflow.get_experiment_by_name("virnuc")
    assert experiment is not None

    def tracked_with(tag: str, value: object) -> list[Any]:
        return list(mlflow.search_runs([experiment.experiment_id], f"tags.`{tag}` = '{value}'"))

    [tracked] = tracked_with("prefect.flow_run_id", run.id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["virnuc.mode"] == "pool"
    assert tracked.data.metrics["lanes"] == len(lanes)


@pytest.mark.timeout(600)
def test_a_run_without_its_input_and_mlflow_and_retried_twice_after_prefect_deploy(
    stack: Stack, genomes: Path, local_run: Path, tmp_path: Path
) -> None:
    """As the page's Retry does it: after a failure, and once it was complete; deployed by Prefect's own command."""
    deploy = ("--no-prompt", "deploy", "--all", "--prefect-file", FILES / "prefect.yaml")
    deployed = stack.shell("prefect", *deploy)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    mlflow, absent, out = stack.program("mlflow"), tmp_path / genomes.name, tmp_path / "run"
    assert mlflow is not None
    mlflow.suspend()
    try:
        run_id = stack.ask(inputs=[str(absent)], out=str(out))
        stack.wait_for(run_id, "Failed")
        absent.write_bytes(genomes.read_bytes())
        for attempt in (2, 3):
            again = Scheduled(name="AwaitingRetry", message="Retry from the page")
            stack.client.set_flow_run_state(run_id, again, force=True)
            wait_until(lambda attempt=attempt: stack.client.read_flow_run(run_id).run_count == attempt)  # type: ignore[misc]
            stack.wait_for(run_id, "Completed", 300)
            done = shards_done(out)
            assert sorted(done) == list(range(len(read_plan(RunFolder(out).plan).shards)))
    finally:
        mlflow.resume()
    assert same_results(local_run, out)
    assert stack.shell("virnuc_cli", "server", "track", out).returncode == 0


def test_a_head_is_trained_and_measured_in_the_pool(stack: Stack, tmp_path: Path) -> None:
    files = {
        kind: [str(write_class(tmp_path / f"{kind}.fa", gc, 8, seed))]
        for seed, (kind, gc) in enumerate((("viral", 0.35), ("other", 0.65)))
    }
    quick = {"chunk_length": 60, "epochs": 2, "devices": SETTINGS["devices"]}
    head, here = tmp_path / "pool.safetensors", tmp_path / "here.safetensors"
    values = {"files": files, "out": str(head), "settings": quick, "lane_minutes": LANE_MINUTES}
    run = run_in_shell(stack, "train/on-demand", "out", **values)
    assert len(stack.children(run.id)) == len(stack.lanes(run.id)) + 1
    assert "virnuc-head" in artifacts(stack, run.id)
    flags = ("--chunk-length", "60", "--epochs", "2", "--devices", SETTINGS["devices"][0])
    given = ("--viral", *files["viral"], "--other", *files["other"])
    done = stack.shell("virnuc_cli", "train", *given, *flags, "--out", here)
    assert done.returncode == 0, done.stderr
    assert head.read_bytes() == here.read_bytes()

    out = tmp_path / "evaluated"
    settings = {"chunk_length": 60, "head": str(head), "devices": SETTINGS["devices"]}
    values = {"files": files, "out": str(out), "settings": settings, "lane_minutes": LANE_MINUTES}
    run_in_shell(stack, "evaluate/on-demand", "out", **values)
    figures = json.loads((out / "evaluation.json").read_text())
    assert figures["head"]["name"] == head.name
    assert figures["chunks"]["scored"] > 0


def artifacts(stack: Stack, run_id: object) -> set[str]:
    of_run = ArtifactFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
    return {artifact.key or "" for artifact in stack.client.read_artifacts(artifact_filter=of_run)}


def test_wrong_parameters_are_refused_before_there_is_a_run(
    stack: Stack, genomes: Path, tmp_path: Path
) -> None:
    before = num_runs(stack)
    right = {"inputs": [str(genomes)], "out": str(tmp_path / "run")}
    wrong: dict[str, dict[str, Any]] = {
        "lane_minutes": {"lane_minutes": -1},
        "inputs": {"inputs": 7},
        "settings.precision": {"settings": {"precision": "fp17"}},
        "settings": {"settings": {"no_such": 1}},
    }
    for field, parameters in wrong.items():
        with pytest.raises(PrefectHTTPStatusError) as caught:
            stack.ask(**{**right, **parameters})
        assert field in caught.value.response.text
    params = [f"--param={name}={json.dumps(value)}" for name, value in right.items()]
    for added, said in (("mode=pol", "'mode'"), ("no_such=1", "no_such")):
        asked = stack.shell("prefect", "deployment", "run", "predict/on-demand", *params, f"--param={added}")
        assert asked.returncode == 1
        assert said in asked.stdout + asked.stderr
    assert num_runs(stack) == before


def test_relative_paths_are_refused_by_the_run(stack: Stack, genomes: Path) -> None:
    run_id = stack.ask(inputs=[str(genomes)], out="run")
    failed = stack.wait_for(run_id, "Failed")
    assert failed.state is not None
    assert "absolute" in (failed.state.message or "")
