"""A run that is disturbed repeatedly: inputs, folder, and the files of an undisturbed one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

from benchmarks.reliability import material
from benchmarks.reliability.cases import Outcome, run_case
from benchmarks.reliability.faults import Fault, Faults, TracedCall
from benchmarks.reliability.small_run import CONTIGS, SHARD_SECONDS, final_files, make_material, run

# How a run is started: in one process, with a lane process, or by the full command line with Prefect.
Way = Literal["inline", "lane", "cli"]

RECORDS: Final = 40
_MOST_SECONDS: Final = {"inline": 60.0, "lane": 120.0, "cli": 300.0}


class Laboratory:
    """One run's folder, into which faults are injected.

    Attributes:
        expected: files of an undisturbed run, see `final_files`.
        trace: calls of the last run with a fault.
    """

    def __init__(self, scratch: Path, way: Way = "inline") -> None:
        self.way: Final = way
        self.root: Final = scratch / "run"
        self.trace: Final = scratch / "trace"
        self._faults = Faults()
        self._made = scratch / "made"
        make_material(self._made, RECORDS)
        # In this process, so that its forks inherit the imports.
        self._work(0)
        self.expected: Final = final_files(self.root)

    def disturbed(self, fault: Fault | None, *, clock_jumps: bool = False) -> Outcome:
        """A new run with a fault; None traces every change."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.trace.unlink(missing_ok=True)
        with self._faults.injected(self.root, fault, trace=self.trace, clock_jumps=clock_jumps):
            return self._run()

    def continued(self) -> Outcome:
        """Resumes the run."""
        return self._run()

    def calls(self) -> list[TracedCall]:
        """Counted calls of the last disturbed run, including the one hit."""
        return TracedCall.read(self.trace)

    def difference(self) -> str:
        """How the run's files differ from those of an undisturbed one; "" if they do not."""
        found = final_files(self.root)
        names = sorted({*found, *self.expected})
        return ", ".join(name for name in names if found.get(name) != self.expected.get(name))

    def problem_with_continuing(self) -> str:
        """Resumes the run; returns what is wrong with the result, or ""."""
        outcome = self.continued()
        if outcome.ending != "completed":
            return f"does not go on: {outcome.ending} {outcome.message}"
        difference = self.difference()
        return f"goes on to other outputs: {difference}" if difference else ""

    def _run(self) -> Outcome:
        most_seconds = _MOST_SECONDS[self.way]
        if self.way == "cli":
            return self._run_command_line(most_seconds)
        return run_case(lambda: self._work(int(self.way == "lane")), most_seconds=most_seconds)

    def _work(self, lanes: int) -> None:
        run(self.root, self._made, lanes=lanes)

    def _run_command_line(self, most_seconds: float) -> Outcome:
        """`virnuc predict` in its own process group."""
        process = subprocess.Popen(
            command_line(self.root, self._made),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=most_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return Outcome(ending="hang", message=f"not ended after {most_seconds:.0f} s")
        code = process.returncode
        message = next((line for line in said.splitlines() if "virnuc: error" in line), said[-300:])
        if code < 0:
            return Outcome(ending="killed" if code == -9 else "crash", message=message)
        if code == 1 or "Traceback" in said:
            return Outcome(ending="traceback", exit_code=code, message=said[-600:])
        return Outcome(ending="refused" if code else "completed", exit_code=code, message=message)


def command_line(root: Path, made: Path) -> list[str]:
    """`virnuc predict` with the settings of `run`."""
    settings = {
        "--out": root,
        "--chunk-length": material.CHUNK_LENGTH,
        "--esm-model": made / "esm2",
        "--dnabert-model": made / "dnabert",
        "--head": made / "head.safetensors",
        "--devices": "cpu",
        "--shard-seconds": SHARD_SECONDS,
    }
    flags = [str(word) for pair in settings.items() for word in pair]
    return [sys.executable, "-m", "virnuc_cli", "predict", str(made / CONTIGS), *flags]
