"""Programs that are kept running until this process is told to stop, and that never outlive it."""

import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal

from virnuc_core.env_config import child_environment
from virnuc_core.errors import UsageError, VirnucError

# Waits before a program that ended is started again; the last one repeats.
RESTART_DELAYS_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# A program that has run for this long was well: its next restart has the first delay again.
WELL_AFTER_SECONDS: Final = 60.0
# Prefect's workers give the runs that they stop 30 s to end.
SECONDS_TO_END: Final = 45.0
_POLL_SECONDS: Final = 0.2
_LINES_OF_LOG: Final = 15

# Reads a pipe that nothing is written to: it closes when this process ends, however that ends. Then the program and
# all that it has started are asked to end, and made to in the end.
_WATCH: Final = """
read -r _
kill -TERM "-$1" || exit
for _ in $(seq "$2"); do sleep 1; kill -0 "-$1" || exit; done
kill -KILL "-$1"
"""
# Begins once it is watched over: nothing is left when this process is killed before that.
_WATCHED: Final = 'read -r _ && exec "$@" </dev/null'

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What to keep running.

    Attributes:
        name: for people.
        command: the program and its arguments.
        environment: variables on top of those of this process.
        log: file for its output, appended to; None for the output of this process.
        orphans: what becomes of the processes that it leaves behind when it dies: they are ended ("kill"), go on
            ("leave"), or go on and are waited for before the program is started again ("await").
        most_deaths: in a row, each soon after its start; with the next one it is given up. None never gives up.
        settle: called when it does not run, before each start and after its end, to put right what its last process
            could not; must not raise.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path | None = None
    orphans: Literal["kill", "leave", "await"] = "kill"
    most_deaths: int | None = None
    settle: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """A started program, which leads a process group of its own, and the shell that watches over it."""

    main: subprocess.Popen[bytes]
    watch: subprocess.Popen[bytes]
    started: float

    @property
    def is_running(self) -> bool:
        return self.main.poll() is None

    @property
    def group_is_running(self) -> bool:
        """Whether it, or anything that it has started, is still there."""
        if self.is_running:
            return True
        with suppress(ChildProcessError):
            # Orphans become children of the first process of a container, which may be this one.
            os.waitpid(-self.main.pid, os.WNOHANG)
        return self.signal_group(0)

    def signal_group(self, number: int) -> bool:
        """Sends a signal to it and all that it has started; False when nothing of it is there."""
        try:
            os.killpg(self.main.pid, number)
        except ProcessLookupError:
            return False
        return True

    def forget(self) -> None:
        """Ends the watch, once there is nothing left to watch over."""
        self.watch.kill()
        self.watch.communicate()


class Supervisor:
    """Keeps programs running inside its `with` block, which SIGINT and SIGTERM end and nothing outlives."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._signals = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Supervisor":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._count_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, programs: Sequence[Program]) -> None:
        """Starts programs and keeps them running from now on; they end before those that were started earlier."""
        group = _Group()
        self._groups.append(group)
        for program in programs:
            group.start(program)

    def poll(self) -> None:
        """Looks after the programs once.

        Raises:
            KeyboardInterrupt: a signal has told this process to end.
            VirnucError: a program has died too often.
        """
        if self._signals:
            raise KeyboardInterrupt
        for group in self._groups:
            group.poll()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Looks after the programs until something has happened.

        Raises:
            KeyboardInterrupt: a signal has told this process to end.
            VirnucError: a program has died too often.
        """
        self.poll()
        while not is_done():
            time.sleep(_POLL_SECONDS)
            self.poll()

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing is raised from here, where a program may just have been started.
        self._signals += 1

    def _end(self) -> None:
        patient_until = time.monotonic() + SECONDS_TO_END
        signals = self._signals
        for group in reversed(self._groups):
            group.end(lambda: time.monotonic() < patient_until and self._signals == signals)


class _Group:
    """Programs that were started together and end together."""

    def __init__(self) -> None:
        self._kept: list[_KeptProgram] = []
        self._processes: list[_Process] = []

    def start(self, program: Program) -> None:
        """Starts a program, and keeps it running."""
        process = _start(program)
        self._processes.append(process)
        self._kept.append(_KeptProgram(program, process))

    def poll(self) -> None:
        """Starts again what has ended and is due.

        Raises:
            VirnucError: a program has died too often.
        """
        self._processes += [process for kept in self._kept if (process := kept.revive()) is not None]
        over = [process for process in self._processes if not process.group_is_running]
        for process in over:
            process.forget()
            self._processes.remove(process)

    def end(self, is_patient: Callable[[], bool]) -> None:
        """Asks the programs to end, then what dead ones have left behind, and makes those end that do not."""

        def wait_for(is_running: Callable[[_Process], bool]) -> None:
            while any(map(is_running, self._processes)) and is_patient():
                time.sleep(0.05)

        for process in self._processes:
            if process.is_running:
                process.main.terminate()
        wait_for(lambda process: process.is_running)
        for process in self._processes:
            process.signal_group(signal.SIGTERM)
        wait_for(lambda process: process.group_is_running)
        for process in self._processes:
            process.signal_group(signal.SIGKILL)
            process.main.wait()
            process.forget()
        for kept in self._kept:
            if kept.program.settle is not None:
                kept.program.settle()


class _KeptProgram:
    """A program, the process that runs it now or ran it last, and when to start it again."""

    def __init__(self, program: Program, process: _Process) -> None:
        self.program = program
        self._process = process
        self._next_start: float | None = None
        self._deaths = 0

    def revive(self) -> _Process | None:
        """Starts the program again when it has ended and it is time; gives the new process.

        Raises:
            VirnucError: it has died too often.
        """
        if self._process.is_running:
            return None
        now = time.monotonic()
        if self._next_start is None:
            self._next_start = now + self._note_death(now)
        orphans = self.program.orphans
        if now < self._next_start or (orphans == "await" and self._process.group_is_running):
            return None
        self._next_start = None
        self._process = _start(self.program)
        return self._process

    def _note_death(self, now: float) -> float:
        """Seconds until the next start."""
        program = self.program
        was_well = now - self._process.started > WELL_AFTER_SECONDS
        self._deaths = 1 if was_well else self._deaths + 1
        how = f"{program.name} ended with exit code {self._process.main.returncode}"
        if program.orphans == "kill":
            self._process.signal_group(signal.SIGKILL)
        if program.most_deaths is not None and self._deaths > program.most_deaths:
            raise VirnucError(f"{how}, {self._deaths} times in a row. {_last_lines(program.log)}")
        delay = RESTART_DELAYS_SECONDS[min(self._deaths, len(RESTART_DELAYS_SECONDS)) - 1]
        waiting = ", once the runs that it has left behind are done" if program.orphans == "await" else ""
        _log.warning("%s; it is started again in %.0f s%s", how, delay, waiting)
        return delay


def _start(program: Program) -> _Process:
    """Starts a program in a process group of its own: Ctrl-C is for this process, which ends all in order."""
    if program.settle is not None:
        program.settle()
    output = open(program.log, "ab") if program.log else None  # noqa: SIM115 - closed below
    try:
        main = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *program.command],
            env=child_environment() | dict(program.environment),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()
    watch = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", str(main.pid), f"{SECONDS_TO_END:.0f}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert main.stdin is not None
    with (
        suppress(BrokenPipeError),
        main.stdin as go,
    ):  # closed when it has been killed by then, which is noticed later
        go.write(b"\n")
    _log.info("%s: started as process %d", program.name, main.pid)
    return _Process(main=main, watch=watch, started=time.monotonic())


@contextmanager
def only_one(lock: Path, complaint: str) -> Iterator[None]:
    """Keeps every other process out of the block.

    Raises:
        UsageError: another one is in it; `complaint` says what that means.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(complaint) from error
        yield


def _last_lines(log: Path | None) -> str:
    """The end of a log, for a message."""
    if log is None:
        return "Its output says why."
    lines = log.read_text(errors="replace").splitlines()[-_LINES_OF_LOG:]
    return "\n".join([f"The end of {log}:", *lines])
