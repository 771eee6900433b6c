"""A whole run of the size of a sequencing sample: made genes to calls, with models of the published sizes.

    python -m benchmarks.main_job [--mbp 30] [--esm-model 650M] [--dnabert-model DNABERT-S] [--precision bf16] [--devices auto]

Contigs of 10 kb are one gene each, so that one frame of almost every chunk is open. Runs `virnuc predict` with random weights, after one
run that compiles what is compiled once on a machine. Writes benchmarks/results/main_job.json: seconds of the command, of its
stages, and of computing, which is the busiest lane with loaded models.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.forward import machine
from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_core.inference.device import resolve_devices
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.heads import MLPClassifier, save_head

CONTIG_CODONS = 3333
STOPS = ("TAA", "TAG", "TGA")


def write_genes(path: Path, num_contigs: int) -> None:
    codons = np.array([a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in STOPS])
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(num_contigs):
            file.write(f">contig_{number}\n{''.join(draw.choice(codons, CONTIG_CODONS))}A\n")


def head_without_calls(width: int) -> MLPClassifier:
    """A random head that calls nothing, as most contigs of most samples are not called."""
    head = MLPClassifier(width)
    with torch.no_grad():
        head.output_layer.bias.copy_(torch.tensor([9.0, -9.0]))
    return head


def measure(fasta: Path, out: Path, flags: list[str]) -> Json:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "virnuc_cli", "predict", str(fasta), "--out", str(out), "--quiet"]
    subprocess.run([*command, *flags], check=True)
    wall = time.perf_counter() - begin
    report = json.loads((out / "run.json").read_text())
    computing = max(lane["seconds"] - lane["load_seconds"] for lane in report["lanes"])
    return {
        "wall": wall,
        "computing": computing,
        "wall_over_computing": round(wall / computing, 3),
        "stages": report["stage_seconds"],
        "lanes": report["lanes"],
    }


def main() -> None:
    parser = options_of("main_job", __doc__)
    parser.add_argument("--mbp", type=int, default=30)
    parser.add_argument("--esm-model", default="650M")
    parser.add_argument("--dnabert-model", default="DNABERT-S")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    entries = (
        *find_entries(arguments.esm_model, "esm2"),
        *find_entries(arguments.dnabert_model, "dnabert_s"),
    )
    width = sum(entry.spec.embedding_dim for entry in entries)
    with TemporaryDirectory(prefix="virnuc-main-job-") as scratch:
        folder = Path(scratch)
        fasta, head = folder / "made.fa", folder / "head.safetensors"
        write_genes(fasta, 100 * arguments.mbp)
        save_head(head_without_calls(width), head)
        flags = ["--chunk-length", "500", "--head", str(head)]
        flags += ["--esm-model", f"random:{arguments.esm_model}"]
        flags += ["--dnabert-model", f"random:{arguments.dnabert_model}"]
        flags += ["--precision", arguments.precision, "--devices", arguments.devices]
        first, *runs = [
            measure(fasta, folder / f"out{number}", flags) for number in range(1 + arguments.repeats)
        ]
    report = {
        "command": command_of("main_job"),
        "machine": machine(resolve_devices(tuple(arguments.devices.split(",")))[0]),
        "mbp": arguments.mbp,
        "first": first,
        "runs": runs,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
