"""What all programs share: cases in forked processes, their outcomes, and the command line that writes the report."""

import argparse
import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self
from unicodedata import category

import torch

from benchmarks.reliability.faults import shim_environment
from benchmarks.reports import print_and_write
from virnuc_core.errors import VirnucError
from virnuc_core.inference import CPU_LIBRARIES

Ending = Literal[
    "completed", "refused", "killed", "traceback", "crash", "hang", "harmful message", "executed"
]

RESULTS: Final = Path(__file__).parents[1] / "results" / "reliability"
# Makes a run in this process byte-identical to one with lane processes.
_LANE_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", **CPU_LIBRARIES}
MEMORY_BYTES: Final = 2 << 30
_SCRATCH: Final = "RELIABILITY_SCRATCH"
_NUM_THREADS: Final = 13  # place in /proc/PID/stat after the session
_TIMERS: Final = (signal.SIGPROF, signal.SIGALRM)


def is_harmless(text: str) -> bool:
    """Whether a terminal shows the text as it is: it has no control, format, surrogate and separator characters."""
    return not any(category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in text.replace("\n", ""))


@dataclass(kw_only=True)
class Outcome:
    """The end of a case: "refused" by an error of virnuc's own with a printable message, or what else happened."""

    ending: Ending = "completed"
    exit_code: int = 0
    message: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Takes in how the block ended, whatever it raised: a panic of a Rust library is no Exception."""
        if isinstance(error, VirnucError):
            self.ending = "refused" if is_harmless(str(error)) else "harmful message"
            self.exit_code, self.message = error.exit_code, str(error)
        elif error is not None:
            frames = reversed(traceback.extract_tb(trace)[-6:])
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
            self.ending, self.exit_code = "traceback", 1
            self.message = f"{type(error).__name__}: {str(error)[:300]} at {where}"
        return True


class Forked:
    """A fork of this process that leads a process group, and runs a function or the program that this executes."""

    def __init__(self, case: Callable[[], object]) -> None:
        self._told, self._printed = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.pid: Final = os.fork()
        if not self.pid:
            self._work(case)
        with suppress(OSError):  # the fork is faster
            os.setpgid(self.pid, self.pid)

    def _work(self, case: Callable[[], object]) -> NoReturn:
        os.setpgid(0, 0)
        for descriptor in (1, 2):
            os.dup2(self._printed.fileno(), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Torch's threads do not exist in the fork, which would wait for them.
        torch.set_num_threads(1)
        with Outcome() as outcome:
            case()
        self._told.write(json.dumps(asdict(outcome)).encode())
        self._told.flush()
        ctypes.CDLL(None).exit(0)  # like a program, with the cleanup of C libraries
        os.abort()  # not reached

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome; None if it has not ended by then."""
        deadline = time.monotonic() + seconds
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
        return self._outcome(ended[1])

    def kill(self) -> None:
        """Kills the process group, and waits until the last process of it has ended."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._read()
        self._await_group()

    def _outcome(self, status: int) -> Outcome:
        told, printed = self._read()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL:
                self._await_group()
                return Outcome(ending="killed")
            ending: Ending = "hang" if number in _TIMERS else "crash"
            return Outcome(ending=ending, message=f"ended by {signal.Signals(number).name}: {printed[-400:]}")
        if told:
            return Outcome(**json.loads(told))
        code = os.WEXITSTATUS(status)  # of the program that was executed
        if code == 1 or "Traceback" in printed:
            return Outcome(ending="traceback", exit_code=code, message=printed[-600:])
        error = next((line for line in printed.splitlines() if "virnuc: error" in line), printed[-300:])
        return Outcome(ending="refused" if code else "completed", exit_code=code, message=error)

    def _read(self) -> list[str]:
        """What was told and printed; closes the files."""
        texts = []
        for file in (self._told, self._printed):
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return texts

    def _await_group(self) -> None:
        while any(_group_of(entry) == self.pid for entry in Path("/proc").iterdir()):
            time.sleep(0.005)


def _group_of(entry: Path) -> int | None:
    """The group of a live process: its files stay open until its last thread has ended."""
    try:
        state, _, group, _, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    is_dead = state == "Z" and int(fields[_NUM_THREADS]) <= 1
    return None if is_dead else int(group)


def run_forked(case: Callable[[], object], seconds: float) -> Outcome:
    """Runs a case to its end, or kills it."""
    forked = Forked(case)
    outcome = forked.wait(seconds)
    if outcome is None:
        forked.kill()
        return Outcome(ending="hang", message=f"not ended after {seconds:.0f} s")
    return outcome


def limit_memory() -> None:
    """Limits the process to MEMORY_BYTES; a soft limit, which it may raise again."""
    pages, resident = (int(word) for word in Path("/proc/self/statm").read_text().split()[:2])
    page = os.sysconf("SC_PAGE_SIZE")
    limit = pages * page + MEMORY_BYTES - resident * page
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def program(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of a program, with the option --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.reliability.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="the report, in JSON")
    return parser


def main(
    parser: argparse.ArgumentParser, measure: Callable[..., dict[str, Any]], *, preload: bool = False
) -> NoReturn:
    """Writes the report of `measure(scratch, **options)`; ends with 1 if it has failures.

    The program first executes itself again in the environment of a lane, with folders of its own and, with `preload`,
    the library that injects faults.
    """
    arguments = vars(parser.parse_args())
    out, name = arguments.pop("out"), str(parser.prog).rpartition(".")[2]
    if _SCRATCH not in os.environ:
        with tempfile.TemporaryDirectory(prefix=f"virnuc-{name}-") as folder:
            (Path(folder) / "tmp").mkdir()
            homes = {"PREFECT_HOME": f"{folder}/prefect", "VIRNUC_HOME": f"{folder}/home"}
            environment = {
                **os.environ,
                **_LANE_ENVIRONMENT,
                **homes,
                "TMPDIR": str(Path(folder, "tmp")),
                _SCRATCH: folder,
            }
            if preload:
                environment |= shim_environment(Path(folder))
            command = [sys.executable, "-m", f"benchmarks.reliability.{name}", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment).returncode)
    logging.disable()
    report = {"kind": name, **measure(Path(os.environ[_SCRATCH]), **arguments)}
    print_and_write(report, out)
    sys.exit(1 if report["failures"] else 0)


def say(done: object) -> None:
    """Prints progress or a failure at once."""
    print(done, file=sys.stderr, flush=True)
