"""SIGKILL of each process in turn during a run, and a run cancelled by the user."""

import os
import signal
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from tests.end_to_end.conftest import wait_until
from tests.production.conftest import (
    ON_GPUS,
    Stack,
    lane_events,
    processes_of,
    same_results,
    shards_done,
    wait_for_mid_run,
)
from virnuc_core.inference.events import LaneStarted

pytestmark = pytest.mark.slow


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run_id(stack: Stack, genomes: Path, local_run: Path, out: Path) -> UUID:
    """A run whose lanes have each finished some shards."""
    run_id = stack.ask(inputs=[str(genomes)], out=str(out))
    wait_for_mid_run(out)
    return run_id


def complete(stack: Stack, run_id: UUID, out: Path, local_run: Path) -> list[str]:
    """Waits for the same results as of the undisturbed run, without work done twice; states of all lanes and plans."""
    stack.wait_for(run_id, "Completed")
    assert same_results(local_run, out)
    done = shards_done(out)
    assert len(done) == len(set(done))
    return sorted((run.state_name or "") for run in stack.children(run_id).values())


def test_lane_goes_on_when_its_device_process_and_then_its_run_is_killed(
    stack: Stack, run_id: UUID, out: Path, local_run: Path
) -> None:
    lane = wait_for_mid_run(out)
    flow_run_process = psutil.Process(lane.pid).parent()
    assert flow_run_process is not None
    os.kill(lane.pid, signal.SIGKILL)

    # The lane's run starts another process for the remaining shards.
    def restarted() -> list[LaneStarted]:
        return [other for other in lane_events(out, LaneStarted) if other.lane == lane.lane][1:]

    [again] = wait_until(restarted)
    assert set(again.shards) < set(lane.shards)
    flow_run_process.kill()
    # The run submits another lane with the remaining shards.
    states = complete(stack, run_id, out, local_run)
    assert set(states) == {"Completed", "Crashed"}
    assert states.count("Crashed") == 1


def test_work_of_a_lane_that_hangs_is_done_by_another(
    stack: Stack, genomes: Path, local_run: Path, out: Path
) -> None:
    run_id = stack.ask({"VIRNUC_LANE_TIMEOUT": "20"}, inputs=[str(genomes)], out=str(out))
    lane = wait_for_mid_run(out)
    flow_run_process = psutil.Process(lane.pid).parent()
    assert flow_run_process is not None
    for process in (flow_run_process, psutil.Process(lane.pid)):
        process.suspend()
    states = complete(stack, run_id, out, local_run)
    assert states.count("Completed") == len(states) - 1
    wait_until(lambda: not psutil.pid_exists(lane.pid) and not flow_run_process.is_running(), 60)


def kill_worker_of_runs(stack: Stack) -> None:
    [worker] = [
        process for process in processes_of(stack.home) if {"--pool", "virnuc-runs"} <= set(process.cmdline())
    ]
    worker.kill()


def test_a_run_whose_worker_is_killed_is_scheduled_again(
    stack: Stack, run_id: UUID, out: Path, local_run: Path
) -> None:
    kill_worker_of_runs(stack)
    wait_until(lambda: stack.state(run_id) == "Crashed", 30)
    wait_until(lambda: stack.state(run_id) != "Crashed", 90)
    assert set(complete(stack, run_id, out, local_run)) <= {"Completed", "Cancelled"}
    assert stack.client.read_flow_run(run_id).run_count == 2


def test_a_run_whose_worker_is_killed_can_be_cancelled(stack: Stack, run_id: UUID, out: Path) -> None:
    """When it has been scheduled again; Prefect cancels no run that has crashed."""
    pool = "virnuc-gpu" if ON_GPUS else "virnuc-cpu"
    queue = stack.client.read_work_queue_by_name("normal", work_pool_name=pool)
    stack.client.update_work_queue(queue.id, is_paused=True)  # lanes are left to begin
    try:
        kill_worker_of_runs(stack)
        wait_until(lambda: stack.state(run_id) == "Crashed", 30)
        wait_until(lambda: stack.state(run_id) != "Crashed", 90)
        cancel(stack, run_id)
        wait_until(lambda: stack.state(run_id) == "Cancelled", 60)
    finally:
        stack.client.update_work_queue(queue.id, is_paused=False)
    assert_no_lane_begins(stack, run_id, out)


def cancel(stack: Stack, run_id: UUID) -> None:
    cancelled = stack.shell("prefect", "flow-run", "cancel", str(run_id))
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr


def assert_no_lane_begins(stack: Stack, run_id: UUID, out: Path) -> None:
    """After its run was cancelled; those at work are ended."""
    ended = {"Completed", "Cancelled"}
    wait_until(lambda: {run.state_name for run in stack.children(run_id).values()} <= ended, 60)
    lanes = lane_events(out, LaneStarted)
    wait_until(lambda: not any(psutil.pid_exists(lane.pid) for lane in lanes), 60)
    executing = [process for process in processes_of(stack.home) if "execute" in process.cmdline()]
    assert executing == [], [process.cmdline() for process in executing]
    assert len(lane_events(out, LaneStarted)) == len(lanes)


def test_run_listens_on_loopback_only_and_leaves_nothing_behind_when_it_is_cancelled(
    stack: Stack, run_id: UUID, out: Path
) -> None:
    connections = [
        connection for process in processes_of(stack.home) for connection in process.net_connections()
    ]
    listening = {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert {stack.port, stack.mlflow_port} <= {address.port for address in listening}
    cancel(stack, run_id)
    stack.wait_for(run_id, "Cancelled", 60)
    assert_no_lane_begins(stack, run_id, out)
