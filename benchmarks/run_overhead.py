"""What a whole run costs besides its work: the command, its imports, its stages, and with a Prefect server the flow.

    python -m benchmarks.run_overhead [FASTA] [--repeats 5] [--flags "--preset tiny"] [--direct]

Runs `virnuc predict` directly, then, without --direct, as flows of a Prefect server with SQLite on the loopback interface; each in turn with
`python -c "import torch"`, and after one run that warms the machine up. Overhead is the wall time of the command less the
time in which the busiest lane computed with loaded models. Writes benchmarks/results/run_overhead.json.
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

from benchmarks.forward import machine
from benchmarks.lane_overhead import serving
from benchmarks.reports import EXAMPLE, Json, command_of, options_of, print_and_write
from virnuc_core.inference.device import resolve_devices


def predict(fasta: Path, out: Path, flags: list[str]) -> tuple[float, float, Json]:
    """Seconds of the command, those in which the busiest lane computed with loaded models, and run.json."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "virnuc_cli", "predict", str(fasta), "--out", str(out), "--quiet"]
    subprocess.run([*command, *flags], check=True)
    wall = time.perf_counter() - begin
    report = json.loads((out / "run.json").read_text())
    return wall, max(lane["seconds"] - lane["load_seconds"] for lane in report["lanes"]), report


def measure(fasta: Path, out: Path, flags: list[str]) -> Json:
    """Seconds of one run: the command, the busiest lane with loaded models, and the stages."""
    wall, work, report = predict(fasta, out, flags)
    return {"run_as": report["run_as"], "wall": wall, "work": work, "stages": report["stage_seconds"]}


def import_torch() -> float:
    """Seconds of a process that imports torch."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def measure_runs(fasta: Path, folder: Path, flags: list[str], repeats: int) -> Json:
    """Several runs in a folder, each beside an import of torch."""
    measure(fasta, folder / "warm", flags)
    imports, runs = [], []
    for number in range(repeats):
        imports.append(import_torch())
        runs.append(measure(fasta, folder / f"run{number}", flags))
    overheads = sorted(run["wall"] - run["work"] for run in runs)
    walls = [run["wall"] for run in runs]
    return {
        "wall_seconds": median(walls),
        "wall_over_import_torch": round(median(walls) / median(imports), 2),
        "overhead_seconds": {"smallest": overheads[0], "median": median(overheads), "largest": overheads[-1]},
        "import_torch": imports,
        "runs": runs,
    }


def main() -> None:
    """Command line."""
    parser = options_of("run_overhead", __doc__)
    parser.add_argument("fasta", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=4872)
    parser.add_argument("--flags", type=shlex.split, default=[])
    parser.add_argument("--direct", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="virnuc-overhead-") as scratch:
        home = Path(scratch)
        os.environ |= {"VIRNUC_HOME": str(home)}
        load = os.getloadavg()
        direct = measure_runs(arguments.fasta, home / "direct", arguments.flags, arguments.repeats)
        flow = None
        if not arguments.direct:
            with serving(home, arguments.port):
                flow = measure_runs(arguments.fasta, home / "flow", arguments.flags, arguments.repeats)
    report = {
        "command": command_of("run_overhead"),
        "machine": machine(resolve_devices(("auto",))[0]),
        "cores": os.cpu_count(),
        "load_average": load,
        "direct": direct,
        "flow": flow,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
