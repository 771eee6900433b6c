"""What a call of a model that stays loaded costs besides computing.

    python -m benchmarks.resident [--model 8M,650M] [--number 2000] [--length 300] [--device auto] [--repeats 5]

Embeds random proteins by ESM-2 with random weights: a plain `embed()` in a process that has not imported virnuc, then in
one process the first call of an `Embedder`, and further ones. Writes benchmarks/results/resident.json: wall seconds of the
calls, and those of computing, which are from the first batch on the device to the end of the last one, as in `run.json`.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median
from unittest.mock import patch

import numpy as np

from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_core import api
from virnuc_core.benchmark.run import machine
from virnuc_core.benchmark.synthetic import random_sequences
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.resident import ResidentModels
from virnuc_core.run_folder import RunFolder

PLAIN = """
import json, sys, time
sequences, model, devices = json.load(sys.stdin)
begin = time.perf_counter()
from virnuc_core import embed
embed(sequences, model, devices=devices)
print(time.perf_counter() - begin)
"""


class Watched(ResidentModels):
    """Keeps the seconds of computing of the last run."""

    computing = 0.0

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards."""
        reports = super().compute(folder)
        self.computing = max(sum(shard.seconds.forward for shard in report.shards) for report in reports)
        return reports


def measure(model: str, sequences: list[str], devices: str, repeats: int) -> Json:
    """Seconds of calls with one model."""
    given = json.dumps((sequences, model, devices))
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN], input=given, capture_output=True, text=True, check=True
    )
    calls: list[Json] = []
    with patch.object(api, "ResidentModels", Watched), api.Embedder(model, devices=devices) as embedder:
        for _ in range(1 + repeats):
            begin = time.perf_counter()
            embedder.embed(sequences)
            wall = time.perf_counter() - begin
            watched = embedder._models
            assert isinstance(watched, Watched)
            calls.append({"wall": wall, "computing": watched.computing})
    later = calls[1:]
    return {
        "model": model,
        "plain_embed_seconds": float(plain.stdout),
        "first_call_seconds": calls[0]["wall"],
        "second_call_over_computing": later[0]["wall"] / later[0]["computing"],
        "later_calls_over_computing": median(call["wall"] / call["computing"] for call in later),
        "overhead_seconds": median(call["wall"] - call["computing"] for call in later),
        "calls": calls,
    }


def main() -> None:
    """Command line."""
    parser = options_of("resident", __doc__)
    parser.add_argument("--model", default="8M,650M")
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument(
        "--length", type=int, default=300, help="mean residues, from a third to five thirds of it"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, or the index of a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    draw = np.random.default_rng(0)
    third = arguments.length // 3
    lengths = draw.integers(third, 5 * third + 1, arguments.number)
    sequences = random_sequences("esm2", lengths, draw).to_strings()
    devices = resolve_devices((arguments.device,))[0].removeprefix("cuda:")
    report = {
        "command": command_of("resident"),
        "machine": machine(resolve_devices((devices,))[0]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "proteins": {"number": len(sequences), "residues": int(lengths.sum())},
        "models": [
            measure(f"esm2:random:{name}", sequences, devices, arguments.repeats)
            for name in arguments.model.split(",")
        ],
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
