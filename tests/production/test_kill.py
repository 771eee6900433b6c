"""SIGKILL of each process in turn during a run, and a run cancelled by the user."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.production.conftest import (
    Stack,
    lanes_started,
    same_results,
    shards_done,
    wait_for_mid_run,
    wait_until,
)


def has_no_shard_twice(out: Path) -> bool:
    done = shards_done(out)
    return len(done) == len(set(done))


def listening(stack: Stack) -> set[tuple[str, int]]:
    """Address and port of every listening socket."""
    connections = [connection for process in stack.processes() for connection in process.net_connections()]
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_lane_goes_on_when_its_device_process_and_then_its_run_is_killed(
    stack: Stack, genomes: Path, local_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_id = stack.ask(inputs=[str(genomes)], out=str(out))
    lane = wait_for_mid_run(out)
    flow_run_process = psutil.Process(lane.pid).parent()
    assert flow_run_process is not None
    os.kill(lane.pid, signal.SIGKILL)
    # The lane's run starts another process for the remaining shards.
    again = wait_until(
        lambda: [other for other in lanes_started(out) if other.lane == lane.lane][1:], "again"
    )[0]
    assert set(again.shards) < set(lane.shards)
    flow_run_process.kill()
    # The run submits another lane with the remaining shards.
    stack.wait_for(run_id, "Completed")
    assert same_results(local_run, out)
    assert has_no_shard_twice(out)
    states = sorted((run.state_name or "") for run in stack.children(run_id).values())
    assert states == ["Completed", "Completed", "Completed", "Crashed"]


@pytest.mark.slow
def test_run_goes_on_while_worker_and_server_are_killed(
    stack: Stack, genomes: Path, local_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_id = stack.ask(inputs=[str(genomes)], out=str(out))
    wait_for_mid_run(out)
    for word in ("worker", str(stack.port)):
        program = stack.program(word)
        assert program is not None
        program.kill()
    stack.wait_for(run_id, "Completed")
    assert same_results(local_run, out)
    assert has_no_shard_twice(out)
    wait_until(lambda: stack.program("worker"), "the worker is back")
    # The run whose worker was killed has continued.
    assert {run.state_name for run in stack.children(run_id).values()} == {"Completed"}


@pytest.mark.slow
def test_killed_run_continues_when_it_is_retried(
    stack: Stack, genomes: Path, local_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_id = stack.ask(inputs=[str(genomes)], out=str(out))
    wait_for_mid_run(out)
    stack.process_of(run_id).kill()
    stack.wait_for(run_id, "Crashed")
    # After its cleanup, about 4 s later, the worker reports the crash again, even over a retry.
    time.sleep(8)
    retried = stack.shell("prefect", "flow-run", "retry", str(run_id))
    assert retried.returncode == 0, retried.stderr
    wait_until(lambda: stack.state(run_id) != "Crashed", "it is tried again")
    stack.wait_for(run_id, "Completed")
    assert same_results(local_run, out)
    assert has_no_shard_twice(out)


@pytest.mark.slow
def test_run_listens_on_loopback_only_and_leaves_nothing_behind_when_it_is_cancelled(
    stack: Stack, genomes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_id = stack.ask(inputs=[str(genomes)], out=str(out))
    wait_for_mid_run(out)
    assert {host for host, _ in listening(stack)} == {"127.0.0.1"}
    assert {stack.port, stack.mlflow_port} <= {port for _, port in listening(stack)}
    cancelled = stack.shell("prefect", "flow-run", "cancel", str(run_id))
    assert cancelled.returncode == 0, cancelled.stderr
    wait_until(
        lambda: not any(psutil.pid_exists(lane.pid) for lane in lanes_started(out)), "the devices are free"
    )
    stack.wait_for(run_id, "Cancelled")
    wait_until(
        lambda: {run.state_name for run in stack.children(run_id).values()} <= {"Completed", "Cancelled"},
        "lanes are cancelled",
    )
    # No lane is started any more.
    assert not [process for process in stack.processes() if "deployments.engine" in process.cmdline()]
