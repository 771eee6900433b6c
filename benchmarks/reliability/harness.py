"""What the programs share: a small run in forks of this process, how it ends, and the command line that writes the report."""

import argparse
import hashlib
import json
import logging
import os
import shutil
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
from random import Random
from typing import Any, Final, NoReturn
from unicodedata import category

import torch

from benchmarks.reports import print_and_write
from virnuc_core.api import predict
from virnuc_core.errors import VirnucError
from virnuc_core.inference import CPU_LIBRARIES

_SCRATCH: Final = "RELIABILITY_SCRATCH"
_MOST_SECONDS: Final = 300.0
# Files with the time and place of a run.
_UNLIKE: Final = ("run.json", "report.html", "virnuc_mqc.json", ".virnuc.lock")


def is_harmless(text: str) -> bool:
    """Whether a terminal shows the text as it is: it has no control, format, surrogate and separator characters."""
    return not any(category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in text.replace("\n", ""))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended.

    Attributes:
        ending: "completed"; "refused" by an error of virnuc's own with a printable message; "killed"; or "harmful message",
            "traceback", "crash" and "hang", which must not happen.
    """

    ending: str
    exit_code: int = 0
    message: str = ""


def outcome_of(case: Callable[[], object]) -> Outcome:
    try:
        case()
    except VirnucError as error:
        ending = "refused" if is_harmless(str(error)) else "harmful message"
        return Outcome(ending, error.exit_code, str(error))
    except BaseException as error:  # noqa: BLE001 - a panic of a Rust library is no Exception
        frames = reversed(traceback.extract_tb(error.__traceback__)[-6:])
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        return Outcome("traceback", 1, f"{type(error).__name__}: {str(error)[:300]} at {where}")
    return Outcome("completed")


class Forked:
    """A fork of this process that leads a process group, and runs a function or the program that this executes."""

    def __init__(self, case: Callable[[], object]) -> None:
        self._told = tempfile.TemporaryFile()  # noqa: SIM115
        self.pid: Final = os.fork()
        if not self.pid:
            self._work(case)
        with suppress(OSError):  # the fork is faster
            os.setpgid(self.pid, self.pid)

    def _work(self, case: Callable[[], object]) -> NoReturn:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        self._told.write(json.dumps(asdict(outcome_of(case))).encode())
        self._told.flush()
        os._exit(0)

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome; None if it has not ended by then."""
        deadline = time.monotonic() + seconds
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
        self._end_group()
        self._told.seek(0)
        told = self._told.read()
        if os.WIFSIGNALED(ended[1]):
            number = os.WTERMSIG(ended[1])
            name = signal.Signals(number).name
            return Outcome("killed" if number == signal.SIGKILL else "crash", 1, f"ended by {name}")
        if told:
            return Outcome(**json.loads(told))
        code = os.waitstatus_to_exitcode(ended[1])  # of the program that was executed
        return Outcome({0: "completed", 1: "traceback"}.get(code, "refused"), code)

    def kill(self) -> None:
        """Kills the process group, and waits until the last process of it has ended."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._end_group()

    def _end_group(self) -> None:
        deadline = time.monotonic() + 10  # processes that nobody waits for stay in the group for good
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.005)


def run_forked(case: Callable[[], object], seconds: float = _MOST_SECONDS) -> Outcome:
    forked = Forked(case)
    outcome = forked.wait(seconds)
    if outcome is None:
        forked.kill()
        return Outcome("hang", 1, f"not ended after {seconds:.0f} s")
    return outcome


def write_contigs(path: Path, number: int) -> None:
    draw = Random(0)
    with path.open("w") as file:
        for place in range(number):
            bases = "".join(draw.choices("ACGT", k=draw.choice((150, 400, 900))))
            file.write(f">contig{place % 37}\n{bases}\n")


def work(contigs: Path, root: Path) -> None:
    predict(contigs, out=root, chunk_length=200, devices=("cpu",), shard_seconds=0.02)


def final_files(root: Path) -> dict[str, str]:
    """Digest of every file of a run except those with times, including files that should not be there."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.name not in _UNLIKE
        and path.parent.name != "lanes"
        and ".damaged-" not in path.name
    }


class SmallRun:
    """A run with the bundled models and a dozen shards that is disturbed and resumed.

    Attributes:
        expected: digests of what an undisturbed run leaves.
    """

    def __init__(self, scratch: Path, num_contigs: int = 20) -> None:
        self.root: Final = scratch / "run"
        self.contigs: Final = scratch / "contigs.fa"
        write_contigs(self.contigs, num_contigs)
        torch.set_num_threads(1)
        self.work()  # in this process, so that its forks inherit the imports
        self.expected: Final = final_files(self.root)
        self.num_files: Final = self.count_files()

    def work(self) -> None:
        work(self.contigs, self.root)

    def work_as_command(self) -> NoReturn:
        """The same by `virnuc predict`, which takes the place of this process."""
        command = [sys.executable, "-m", "virnuc_cli", "predict", str(self.contigs), "--out", str(self.root)]
        flags = ["--chunk-length", "200", "--devices", "cpu", "--shard-seconds", "0.02"]
        os.execv(command[0], [*command, *flags])  # noqa: S606 - a program of our own, and no shell

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def count_files(self) -> int:
        return sum(len(files) for _, _, files in os.walk(self.root))

    def difference(self) -> str:
        """Names of the files that differ from those of an undisturbed run; "" if none does."""
        found = final_files(self.root)
        names = sorted({*found, *self.expected})
        return ", ".join(name for name in names if found.get(name) != self.expected.get(name))

    def problem_with_resuming(self) -> str:
        """Resumes it; returns what is wrong with the result, or ""."""
        outcome = run_forked(self.work)
        if outcome.ending != "completed":
            return f"is not resumed: {outcome}"
        difference = self.difference()
        return f"is resumed to other outputs: {difference}" if difference else ""


def main(
    parser: argparse.ArgumentParser,
    measure: Callable[..., dict[str, Any]],
    prepare: Callable[[Path], dict[str, str]] = lambda folder: {},
) -> NoReturn:
    """Writes the report of `measure(scratch, **options)`; ends with 1 if it has failures.

    The program first executes itself again in the environment of a lane, to which `prepare(folder)` may add.
    """
    arguments = vars(parser.parse_args())
    out, name = arguments.pop("out"), parser.prog.rpartition(".")[2]
    if _SCRATCH not in os.environ:
        with tempfile.TemporaryDirectory(prefix=f"virnuc-{name}-") as folder:
            homes = {"PREFECT_HOME": f"{folder}/prefect", "VIRNUC_HOME": f"{folder}/home", _SCRATCH: folder}
            environment = (
                os.environ | {"OMP_NUM_THREADS": "1"} | CPU_LIBRARIES | homes | prepare(Path(folder))
            )
            command = [sys.executable, "-m", f"benchmarks.reliability.{name}", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment).returncode)
    logging.disable()
    report = {"kind": name, **measure(Path(os.environ[_SCRATCH]), **arguments)}
    print_and_write(report, out)
    sys.exit(1 if report["failures"] else 0)


def say(done: object) -> None:
    print(done, file=sys.stderr, flush=True)
