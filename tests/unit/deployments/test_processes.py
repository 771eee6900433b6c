"""Supervised programs: real ones, mostly shells."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deployments import processes
from deployments.processes import Program, interruptible, keep_running
from virnuc_core.errors import VirnucError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_DELAYS_SECONDS", (0.0, 0.05))
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.01)


def shell(folder: Path, script: str, **options: object) -> Program:
    values = {"name": "shell", "environment": {}, "log": folder / "log", **options}
    return Program(command=("/bin/sh", "-c", f"cd {folder}; {script}"), **values)  # type: ignore[arg-type]


def run_until(program: Program, is_done: Callable[[], object]) -> None:
    """Keeps a program running until `is_done`."""

    async def main() -> None:
        task = asyncio.create_task(keep_running(program))
        deadline = time.monotonic() + 60
        while not is_done() and not task.done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=False)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_program_that_ends_is_started_again(tmp_path: Path) -> None:
    program = shell(tmp_path, 'echo $$ >> pids; echo "$WHAT"', environment={"WHAT": "said"})
    run_until(program, lambda: len(pids(tmp_path)) == 3)
    assert len(set(pids(tmp_path))) == len(pids(tmp_path))
    assert program.log.read_text().startswith("said\nsaid\n")


def test_program_that_dies_too_often_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = shell(tmp_path, "echo no such database >&2; exit 3", name="server", max_restarts=2)
    with pytest.raises(VirnucError, match=r"(?s)server ended with exit code 3, 3 times.*no such database"):
        asyncio.run(keep_running(program))


@pytest.mark.parametrize(
    ("script", "grace_seconds"),
    [
        ("sleep 100 & echo $! $$ >> pids; wait", 45.0),
        ("trap '' TERM; echo $$ $$ >> pids; while :; do sleep 0.1; done", 0.3),  # ignores SIGTERM
    ],
)
def test_cancelling_ends_what_programs_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, grace_seconds: float
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", grace_seconds)
    run_until(shell(tmp_path, script), lambda: len(pids(tmp_path)) == 2)
    assert all(map(is_over, pids(tmp_path)))


@pytest.mark.parametrize("keep_children", [False, True])
def test_children_of_a_dead_program_are_killed_or_kept(tmp_path: Path, keep_children: bool) -> None:
    was_alive = []

    def is_done() -> bool:
        if len(starts := pids(tmp_path)) < 3:
            return False
        was_alive.append(not is_over(starts[0]))
        return True

    run_until(shell(tmp_path, "sleep 100 & echo $! >> pids; exit 1", keep_children=keep_children), is_done)
    assert was_alive == [keep_children]
    assert all(map(is_over, pids(tmp_path)))


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from deployments.processes import Program, keep_running
command = ("/bin/sh", "-c", "cd {tmp_path}; sleep 100 & echo $! >> pids; echo $$ >> pids; wait")
asyncio.run(keep_running(Program(name="shell", command=command, environment={{}}, log=Path("{tmp_path}/log"))))
"""
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as killed:
        while len(pids(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.kill()
    while not all(map(is_over, pids(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [is_over(pid) for pid in pids(tmp_path)] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_wait(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def wait() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    with interruptible(), pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
    assert signal.getsignal(number) is before
