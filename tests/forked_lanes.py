"""Forks lanes from a process that has imported torch; a new interpreter takes 2.5 s of CPU time for that."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

import pytest

from virnuc_core import env_config

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["virnuc_core.inference.worker"])


class ForkedContext:
    """The part of a multiprocessing context that the launcher uses."""

    def Pipe(self, duplex: bool) -> tuple[Connection, Connection]:
        return _CONTEXT.Pipe(duplex)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], **rest: Any) -> ForkServerProcess:
        """Inherits the variables of this process, as a spawned one does."""
        return _CONTEXT.Process(target=_run, args=(dict(os.environ), target, args), **rest)


def fork_lanes(patch: pytest.MonkeyPatch) -> None:
    """Forks lanes from here on; tests/crash, tests/production and tests/unit/inference test spawned ones."""
    get_context = multiprocessing.get_context
    patch.setattr(
        multiprocessing,
        "get_context",
        lambda method=None: ForkedContext() if method == "spawn" else get_context(method),
    )


class KilledContext(ForkedContext):
    """Ends processes of one lane by SIGKILL, the first `times`, when they are to write one more than `num_shards`."""

    def __init__(self, lane: int, num_shards: int, times: int) -> None:
        self._name, self._num_shards, self._times = f"virnuc-lane-{lane}", num_shards, times

    def Process(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str, **rest: Any
    ) -> ForkServerProcess:
        if name == self._name and self._times:
            self._times -= 1
            target, args = _run_and_die, (self._num_shards, target, args)
        return super().Process(target, args, name=name, **rest)


def _run_and_die(num_shards: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_shards
        if event == "os.rename" and "shard_" in str(arguments[1]):
            if num_shards == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            num_shards -= 1

    sys.addaudithook(count)
    target(*args)


def _run(variables: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    env_config.reload()
    target(*args)
