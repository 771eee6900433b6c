"""Programs that end with this process, and blocks that a signal ends or that only one process is in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from virnuc_core.env_config import child_environment
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.files import make_private, open_lock, try_lock


class Programs:
    """Programs that run for a block, with their logs in a folder; those started last are ended first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a program in a session of its own: Ctrl-C reaches this process alone, which ends it."""
        path = self.folder / f"{name}.log"
        make_private(path)
        with open(path, "ab") as log:
            self._running[name] = subprocess.Popen(
                (sys.executable, "-P", "-m", "virnuc_core.with_parent", *command),
                env={**child_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits while all programs run; VirnucError with the end of its log when one has ended."""
        while not is_done():
            for name, program in self._running.items():
                if program.poll() is not None:
                    log = self.folder / f"{name}.log"
                    lines = log.read_text(errors="replace").splitlines()[-15:]
                    ended = f"{name} ended with exit code {program.returncode}. Last lines of {log}:"
                    raise VirnucError("\n".join([ended, *lines]))
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        for program in reversed(self._running.values()):
            end_program(program)


def end_program(program: "subprocess.Popen[bytes]") -> None:
    """Ends a program in a session of its own, which ends what it has started; kills what is left of both."""
    program.terminate()
    with suppress(subprocess.TimeoutExpired):
        program.wait(45)  # Prefect's workers give their runs 30 s
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


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
