"""What a lane costs besides its work: starting, importing, loading, and everything that Prefect does for it.

    python -m benchmarks.lane_overhead [--repeats 5] [--lanes 6]

Everything is real: the lane flow of this package, its device process on the CPU with the bundled models, and a
Prefect server with SQLite and a worker of their own, on the loopback interface. In one process a lane finds nothing
to do; on the pool each has one small shard. All measurements are kept; quote minima or medians, since other programs
may be at work. Writes benchmarks/results/lane_overhead.json.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.reports import print_and_write
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.planning import open_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

RESULT: Final = Path(__file__).parent / "results" / "lane_overhead.json"
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "contigs.fa.gz"
# So that the few examples make a shard for each lane.
_SHARD_SECONDS: Final = 0.2
# What a lane's processes load, from nothing to everything.
_PROGRAMS: Final = {
    "interpreter": "pass",
    "torch": "import torch",
    "device process": "import virnuc_core.inference.worker",
    "Prefect": "import prefect",
    "flow-run process": "import prefect.engine, prefect.flow_engine, flows.lanes",
    "parent": "import flows.predict",
    "MLflow": "import mlflow",
}


def program_seconds(repeats: int) -> dict[str, list[float]]:
    """Seconds of whole processes of this Python that only import."""
    seconds: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(repeats):
        for name, program in _PROGRAMS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def plan_a_run(root: Path) -> RunFolder:
    """A run over the example contigs with the bundled models; the folder holds its plan and frame store."""
    folder = RunFolder(root)
    config = RunConfig(
        chunk_length=500,
        esm_model="tiny",
        dnabert_model="tiny",
        devices=("cpu",),
        shard_seconds=_SHARD_SECONDS,
    )
    store = build_frame_store([str(EXAMPLE)], folder.frames, 500)
    open_plan(config, store, "predict", ("cpu",), folder)
    return folder


def device_process_seconds(folder: RunFolder, repeats: int) -> dict[str, list[float]]:
    """Seconds of a lane's device process without shards: until its models are loaded, and until it has ended."""
    reports = [run_lane(folder, (), "cpu") for _ in range(repeats)]
    return {
        "load_seconds": [report.load_seconds for report in reports],
        "seconds": [report.seconds for report in reports],
    }


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=6, help="lanes on the work pool")
    parser.add_argument("--port", type=int, default=4871)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="virnuc-overhead-") as scratch:
        home = Path(scratch)
        prepare_environment(home, arguments.port)
        # Prefect reads the environment when it is imported, so not before the line above.
        from benchmarks import prefect_costs, prefect_server

        (home / "run").mkdir()
        folder = plan_a_run(home / "run")
        report: dict[str, object] = {
            "command": "python -m benchmarks.lane_overhead " + " ".join(sys.argv[1:]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other programs",
            "load_average": os.getloadavg(),
            "versions": {name: version(name) for name in ("prefect", "mlflow", "torch")},
            "program_seconds": program_seconds(arguments.repeats),
            "device_process": device_process_seconds(folder, arguments.repeats),
        }
        with prefect_server.serving(home, arguments.port) as server:
            report["server_start_seconds"] = server.start_seconds
            report["in_process"] = prefect_costs.subflow_seconds(arguments.repeats, folder.root)
            report["pool"] = prefect_costs.pool_seconds(server, arguments.lanes, folder)
            report["server"] = prefect_server.server_rates(server.url, arguments.repeats)
    print_and_write(report, arguments.out)


def prepare_environment(home: Path, port: int) -> None:
    """Gives Prefect and virnuc a home of their own, here and in every process started from here."""
    os.environ.update(
        VIRNUC_HOME=str(home),
        PREFECT_HOME=str(home),
        PREFECT_API_URL=f"http://127.0.0.1:{port}/api",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="WARNING",
    )


if __name__ == "__main__":
    main()
