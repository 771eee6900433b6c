"""Forks lanes from a process that has imported torch; a new interpreter takes 2.5 s of CPU time for that."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

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


def _run(variables: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    env_config.reload()
    target(*args)
