"""SIGKILL of each process in turn during a run, and a run cancelled by the user."""

import os
import signal
import time
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from tests.end_to_end.conftest import wait_until
from tests.production.conftest import (
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


def test_run_goes_on_while_worker_and_server_are_killed(
    stack: Stack, run_id: UUID, out: Path, local_run: Path
) -> None:
    for word in ("worker", str(stack.port)):
        program = stack.program(word)
        assert program is not None
        program.kill()
    # The run whose worker was killed continues.
    assert set(complete(stack, run_id, out, local_run)) == {"Completed"}
    wait_until(lambda: stack.program("worker"), 60)


def test_killed_run_continues_when_it_is_retried(
    stack: Stack, run_id: UUID, out: Path, local_run: Path
) -> None:
    psutil.Process(int(stack.client.read_flow_run(run_id).infrastructure_pid or "")).kill()
    stack.wait_for(run_id, "Crashed")
    # After its cleanup, about 4 s later, the worker reports the crash again, even over a retry.
    time.sleep(8)
    retried = stack.shell("prefect", "flow-run", "retry", str(run_id))
    assert retried.returncode == 0, retried.stderr
    wait_until(lambda: stack.state(run_id) != "Crashed", 60)
    complete(stack, run_id, out, local_run)


def test_run_listens_on_loopback_only_and_leaves_nothing_behind_when_it_is_cancelled(
    stack: Stack, run_id: UUID, out: Path
) -> None:
    connections = [
        connection for process in processes_of(stack.home) for connection in process.net_connections()
    ]
    listening = {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert {stack.port, stack.mlflow_port} <= {address.port for address in listening}
    cancelled = stack.shell("prefect", "flow-run", "cancel", str(run_id))
    assert cancelled.returncode == 0, cancelled.stderr
    wait_until(lambda: not any(psutil.pid_exists(lane.pid) for lane in lane_events(out, LaneStarted)), 60)
    stack.wait_for(run_id, "Cancelled")
    ended = {"Completed", "Cancelled"}
    wait_until(lambda: {run.state_name for run in stack.children(run_id).values()} <= ended, 60)
    # No lane is started any more.
    assert not [process for process in processes_of(stack.home) if "deployments.engine" in process.cmdline()]
