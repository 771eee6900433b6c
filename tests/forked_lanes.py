"""Forks lanes from a process that has imported torch; a new interpreter takes 2.5 s of CPU time for that."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Final

import pytest

from virnuc_core import env_config
from virnuc_core.inference import lane_process

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["virnuc_core.inference.lanes"])


class ForkedLane:
    """The part of a `subprocess.Popen` that a lane uses."""

    def __init__(
        self, connection: Connection, device: str, environment: dict[str, str], shards: int | None = None
    ) -> None:
        self._process = _CONTEXT.Process(target=_run, args=(environment, connection, device, shards))
        self._process.start()
        assert self._process.pid is not None
        self.pid, self.kill = self._process.pid, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("lane", timeout)


def fork_lanes(patch: pytest.MonkeyPatch) -> None:
    """Forks lanes from here on; tests/crash, tests/production and tests/unit/inference test spawned ones."""
    patch.setattr(lane_process, "_start", ForkedLane)


def kill_lanes(patch: pytest.MonkeyPatch, device: str, num_shards: int, times: int) -> None:
    """Ends lanes of a device by SIGKILL, the first `times`, when they are to write one more than `num_shards`."""
    left = times

    def start(connection: Connection, own: str, environment: dict[str, str]) -> ForkedLane:
        nonlocal left
        is_killed = own == device and left > 0
        left -= is_killed
        return ForkedLane(connection, own, environment, num_shards if is_killed else None)

    patch.setattr(lane_process, "_start", start)


def _run(environment: dict[str, str], connection: Connection, device: str, num_shards: int | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    env_config.reload()
    if num_shards is not None:
        _die_after(num_shards)
    lane_process.serve(connection.fileno(), device)


def _die_after(num_shards: int) -> None:
    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal num_shards
        if event == "os.rename" and "shard_" in str(arguments[1]):
            if num_shards == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            num_shards -= 1

    sys.addaudithook(count)
