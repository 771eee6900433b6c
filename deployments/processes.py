"""Programs that are restarted until this process is told to stop, and that never outlive it."""

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.env_config import child_environment
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.files import make_private, open_lock, try_lock

# Before a restart; the last one repeats.
RESTART_DELAYS_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Prefect's workers give the runs that they stop 30 s to end.
GRACE_SECONDS: Final = 45.0
_POLL_SECONDS: Final = 0.1

# Reads a pipe that nothing is written to: it closes when this process ends, even by SIGKILL. Then the process group
# of the program gets SIGTERM, and SIGKILL in the end.
_WATCH: Final = """
read -r _
kill -TERM "-$1" || exit
for _ in $(seq "$2"); do sleep 1; kill -0 "-$1" || exit; done
kill -KILL "-$1"
"""
# The program begins once it is watched: nothing is left when this process is killed before that.
_WATCHED: Final = 'read -r _ && exec "$@" </dev/null'

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program to keep running.

    Attributes:
        name: for messages.
        environment: added to that of this process.
        log: its output is appended here.
        max_restarts: in a row, each soon after the last; None for no limit.
        keep_children: whether its children survive when it dies.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    max_restarts: int | None = None
    keep_children: bool = False


async def keep_running(program: Program) -> None:
    """Restarts a program whenever it ends, until VirnucError after too often; cancelling ends it and its children."""
    groups: list[_ProcessGroup] = []
    deaths = 0
    try:
        while True:
            started = time.monotonic()
            group = _ProcessGroup(program)
            groups.append(group)
            code = await group.wait()
            if not program.keep_children:
                group.send(signal.SIGKILL)
            # After this uptime, the delays start over.
            deaths = 1 if time.monotonic() - started > 60.0 else deaths + 1
            ended = f"{program.name} ended with exit code {code}"
            if program.max_restarts is not None and deaths > program.max_restarts:
                raise VirnucError(f"{ended}, {deaths} times in a row. {_last_lines(program.log)}")
            delay = RESTART_DELAYS_SECONDS[min(deaths, len(RESTART_DELAYS_SECONDS)) - 1]
            _log.warning("%s; it is started again in %.0f s", ended, delay)
            await asyncio.sleep(delay)
            for empty in [group for group in groups if not group.exists()]:
                empty.close()
                groups.remove(empty)
    finally:
        await asyncio.gather(*(group.end() for group in groups))


class _ProcessGroup:
    """A program and its children in their own session: Ctrl-C reaches only this process, which ends them in order."""

    def __init__(self, program: Program) -> None:
        make_private(program.log)
        with open(program.log, "ab") as output:
            self._main = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sh", *program.command],
                env=child_environment() | dict(program.environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._watch = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", str(self._main.pid), f"{GRACE_SECONDS:.0f}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._main.stdin is not None
        with suppress(BrokenPipeError), self._main.stdin as go:  # killed by now, which `wait` notices
            go.write(b"\n")
        _log.info("%s: started as process %d", program.name, self._main.pid)

    async def wait(self) -> int:
        while (code := self._main.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return code

    def send(self, number: int) -> bool:
        """Returns False when the group has no process left."""
        try:
            os.killpg(self._main.pid, number)
        except ProcessLookupError:
            return False
        return True

    def exists(self) -> bool:
        if self._main.poll() is not None:
            with suppress(ChildProcessError):
                # Orphans become children of the first process of a container, which may be this one.
                os.waitpid(-self._main.pid, os.WNOHANG)
        return self.send(0)

    async def end(self) -> None:
        """Sends SIGTERM to the program, then to its children; SIGKILL after the grace period or when cancelled."""
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                self._main.terminate()
                await self.wait()
                self.send(signal.SIGTERM)
                while self.exists():
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            _log.warning("process %d does not end and is killed", self._main.pid)
        finally:
            self.send(signal.SIGKILL)
            self._main.wait()
            self.close()

    def close(self) -> None:
        self._watch.kill()
        self._watch.communicate()


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt in the block, and SIGINT even where a shell has disabled it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def only_one(lock: Path, complaint: str) -> Iterator[None]:
    """Holds an exclusive lock during the block; UsageError with `complaint` if another process holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(lock) as file:
        if not try_lock(file):
            raise UsageError(complaint)
        yield


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"The end of {log}:", *lines])
