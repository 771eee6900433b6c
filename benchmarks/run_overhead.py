"""What a whole run costs besides its work: the command, the flow, its stages, and the start of the lanes.

    python -m benchmarks.run_overhead [FASTA] [--repeats 5] [--flags "--preset tiny"]

Runs `virnuc predict` in local mode against a Prefect server with SQLite on the loopback interface, after one run that
warms the machine up. Overhead is the wall time of the command less the time in which the busiest lane computed with
loaded models. Writes benchmarks/results/run_overhead.json.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.lane_overhead import serving
from benchmarks.reports import EXAMPLE, Json, command_of, options_of, print_and_write
from virnuc_core.benchmark.run import machine
from virnuc_core.inference.device import resolve_devices


def measure(fasta: Path, out: Path, flags: list[str]) -> Json:
    """Seconds of one run: the command, the busiest lane with loaded models, and the stages of the flow."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "virnuc_cli", "predict", str(fasta), "--out", str(out), "--quiet"]
    subprocess.run([*command, *flags], check=True)
    wall = time.perf_counter() - begin
    report = json.loads((out / "run.json").read_text())
    work = max(lane["seconds"] - lane["load_seconds"] for lane in report["lanes"])
    return {"wall": wall, "work": work, "stages": report["stage_seconds"]}


def main() -> None:
    """Command line."""
    parser = options_of("run_overhead", __doc__)
    parser.add_argument("fasta", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=4872)
    parser.add_argument("--flags", type=shlex.split, default=[])
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="virnuc-overhead-") as scratch, serving(Path(scratch), arguments.port):
        folders = [Path(scratch) / f"run{number}" for number in range(arguments.repeats + 1)]
        runs = [measure(arguments.fasta, folder, arguments.flags) for folder in folders][1:]
    overheads = sorted(run["wall"] - run["work"] for run in runs)
    report = {
        "command": command_of("run_overhead"),
        "machine": machine(resolve_devices(("auto",))[0]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "overhead_seconds": {"smallest": overheads[0], "median": median(overheads), "largest": overheads[-1]},
        "runs": runs,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
