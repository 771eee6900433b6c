"""Programs that are kept running: real ones, mostly shells."""

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
from deployments.processes import Program, Supervisor, only_one
from virnuc_core.errors import UsageError, VirnucError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_DELAYS_SECONDS", (0.0, 0.05))
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.01)


def shell(script: str, **options: object) -> Program:
    values = {"name": "shell", "environment": {}, **options}
    return Program(command=("/bin/sh", "-c", script), **values)  # type: ignore[arg-type]


def within(seconds: float, is_true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_program_that_ends_is_started_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with Supervisor() as supervisor:
        supervisor.start([shell(f'echo $$ >> "{starts}"')])
        supervisor.wait_until(lambda: len(numbers(starts)) == 3)
    assert len(set(numbers(starts))) == 3


def test_environment_and_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Supervisor() as supervisor:
        supervisor.start([shell('echo "$WHAT"; sleep 100', environment={"WHAT": "said"}, log=log)])
        supervisor.wait_until(lambda: "said" in log.read_text())


def test_program_that_dies_too_often_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = shell("echo no such database >&2; exit 3", name="server", log=log, most_deaths=2)
    with Supervisor() as supervisor:
        supervisor.start([program])
        with pytest.raises(
            VirnucError, match=r"(?s)server ended with exit code 3, 3 times.*no such database"
        ):
            supervisor.wait_until(lambda: False)


def test_end_reaches_what_programs_have_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with Supervisor() as supervisor:
        supervisor.start([shell(f'sleep 100 & echo $! >> "{pids}"; echo $$ >> "{pids}"; wait')])
        supervisor.wait_until(lambda: len(numbers(pids)) == 2)
        begin = time.monotonic()
    assert all(map(is_over, numbers(pids)))
    assert time.monotonic() - begin < 5


def test_program_that_does_not_want_to_end_is_made_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SECONDS_TO_END", 0.3)
    pids = tmp_path / "pids"
    with Supervisor() as supervisor:
        supervisor.start([shell(f"trap '' TERM; echo $$ >> \"{pids}\"; while :; do sleep 0.1; done")])
        supervisor.wait_until(lambda: numbers(pids))
    assert all(map(is_over, numbers(pids)))


def test_later_programs_end_first(tmp_path: Path) -> None:
    ends = tmp_path / "ends"

    def program(name: str) -> Program:
        return shell(
            f"trap 'echo {name} >> \"{ends}\"; exit' TERM; touch {tmp_path}/{name}; while :; do sleep 0.02; done"
        )

    with Supervisor() as supervisor:
        supervisor.start([program("server")])
        supervisor.start([program("worker")])
        supervisor.wait_until(lambda: (tmp_path / "server").exists() and (tmp_path / "worker").exists())
    assert ends.read_text().split() == ["worker", "server"]


def test_orphans_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with Supervisor() as supervisor:
        supervisor.start([shell(f'sleep 100 & echo $! >> "{pids}"; exit 1', orphans="kill")])
        supervisor.wait_until(lambda: len(numbers(pids)) == 2)
        assert within(2, lambda: is_over(numbers(pids)[0]))


def test_orphans_are_left(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with Supervisor() as supervisor:
        supervisor.start([shell(f'sleep 100 & echo $! >> "{pids}"; exit 1', orphans="leave")])
        supervisor.wait_until(lambda: len(numbers(pids)) == 2)
        assert not is_over(numbers(pids)[0])
    assert all(map(is_over, numbers(pids)))


def test_orphans_are_waited_for(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with Supervisor() as supervisor:
        supervisor.start([shell(f'sleep 100 & echo $! >> "{pids}"; exit 1', orphans="await")])
        supervisor.wait_until(lambda: numbers(pids))
        until = time.monotonic() + 0.5
        supervisor.wait_until(lambda: time.monotonic() > until)
        assert len(numbers(pids)) == 1
        os.kill(numbers(pids)[0], signal.SIGKILL)
        supervisor.wait_until(lambda: len(numbers(pids)) == 2)


def test_settles_before_each_start_and_after_the_end(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    settled: list[int] = []
    with Supervisor() as supervisor:
        program = shell(f'echo $$ >> "{starts}"', settle=lambda: settled.append(len(numbers(starts))))
        supervisor.start([program])
        supervisor.wait_until(lambda: len(numbers(starts)) == 2)
    assert settled[:2] == [0, 1]
    assert settled[-1] == len(numbers(starts))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Supervisor() as supervisor:
        supervisor.start([shell("sleep 100")])
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            supervisor.wait_until(lambda: False)
    assert signal.getsignal(number) is before


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
from deployments.processes import Program, Supervisor
with Supervisor() as supervisor:
    command = ("/bin/sh", "-c", "sleep 100 & echo $! >> {pids}; echo $$ >> {pids}; wait")
    supervisor.start([Program(name="shell", command=command, environment={{}})])
    supervisor.wait_until(lambda: False)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as killed:
        assert within(60, lambda: len(numbers(pids)) == 2)
        killed.kill()
    assert within(60, lambda: all(map(is_over, numbers(pids))))


def test_only_one(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "lock"
    with (
        only_one(lock, "there is one"),
        pytest.raises(UsageError, match="there is one"),
        only_one(lock, "there is one"),
    ):
        pass
    with only_one(lock, "there is none any more"):
        pass
