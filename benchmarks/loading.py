"""How fast a model is loaded, as a multiple of the time in which its file is read.

    python -m benchmarks.loading [--model 650M] [--format safetensors] [--device cpu] [--precision auto] [--repeats 5]

Makes a file of the size of a catalogue model, with random weights, and reads it from the page cache, loads it and hashes
it in turn, each load in a process of its own. Writes benchmarks/results/loading_MODEL.json: seconds, their ratios to
reading in blocks of 1 MiB with one thread, and the most memory of the host (files in the page cache included) and of the
device that a load took, over what the weights take there.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from benchmarks.reports import RESULTS, Json, command_of, options_of, print_and_write
from virnuc_core.benchmark.run import machine
from virnuc_core.files import file_digest
from virnuc_core.inference.device import resolve_precision
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.checkpoint import TRANSFORMERS_ESM, config_sizes, load_model, parameter_shapes
from virnuc_core.models.digests import kept_digest
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import ModelSpec, Precision

BLOCK_BYTES = 1 << 20
STD = 0.02


def make_safetensors(spec: ModelSpec, path: Path) -> None:
    """Writes an ESM-2 model of random numbers, fp32, one tensor at a time."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        sources = TRANSFORMERS_ESM.sources(name)
        shapes |= dict.fromkeys(sources, (shape[0] // len(sources), *shape[1:]))
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            file.write(torch.empty(shape).normal_(std=STD, generator=generator).numpy().data)


def make_folder(spec: ModelSpec, folder: Path, file_format: str) -> Path:
    """A model folder; returns its weight file."""
    config = config_sizes(spec) | {"position_embedding_type": "rotary", "token_dropout": spec.token_dropout}
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    make_safetensors(spec, weights)
    if file_format == "safetensors":
        return weights
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder / "pytorch_model.bin"


def read(path: Path) -> None:
    """Reads a file once, into the same block of memory."""
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def peak_memory() -> int:
    """Bytes, files in the page cache included; what getrusage reports, a process inherits from the one that starts it."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def load(folder: Path, device: str, precision: Precision) -> None:
    """Prints wall and CPU seconds of one load, and its memory in bytes, as JSON."""
    is_cuda = device != "cpu"
    torch.ones(1, device=device).add_(1)  # the context of a GPU
    before = peak_memory()
    begin, cpu = time.perf_counter(), time.process_time()
    model = load_model(open_checkpoint(str(folder), "esm2"), device, resolve_precision(precision, device))
    if is_cuda:
        torch.cuda.synchronize(device)
    found: Json = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    found["host_bytes"] = peak_memory() - before
    found["device_bytes"] = torch.cuda.max_memory_allocated(device) if is_cuda else None
    found["weight_bytes"] = sum(weights.nbytes for weights in model.state_dict().values())
    print(json.dumps(found))


def measure(weights: Path, arguments: argparse.Namespace) -> list[Json]:
    """Reads, loads and hashes in turn."""
    command = [sys.executable, "-m", "benchmarks.loading", "--load", str(weights.parent)]
    command += ["--device", arguments.device, "--precision", arguments.precision]
    kept_digest(weights)
    rounds = []
    for _ in range(arguments.repeats):
        read_seconds = seconds_of(lambda: read(weights))
        loaded = subprocess.run(command, check=True, capture_output=True, text=True)
        hash_seconds = seconds_of(lambda: file_digest(weights))
        kept_seconds = seconds_of(lambda: kept_digest(weights))
        rounds.append(
            {"read": read_seconds, "hash": hash_seconds, "kept_hash": kept_seconds}
            | json.loads(loaded.stdout)
        )
    return rounds


def main() -> None:
    """Command line."""
    parser = options_of("loading", __doc__)
    parser.add_argument("--model", default="650M")
    parser.add_argument("--format", choices=("safetensors", "torch"), default="safetensors")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="an existing folder for the file [a temporary one]")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(out=None)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.device, arguments.precision)
        return
    [entry] = find_entries(arguments.model, "esm2")
    with TemporaryDirectory(prefix="virnuc-loading-", dir=arguments.folder) as scratch:
        weights = make_folder(entry.spec, Path(scratch), arguments.format)
        size = weights.stat().st_size
        rounds = measure(weights, arguments)
    middle = {name: median(one[name] for one in rounds) for name in ("read", "hash", "kept_hash", "seconds")}
    peak = rounds[0]["device_bytes"] or rounds[0]["host_bytes"]
    report = {
        "command": command_of("loading"),
        "machine": machine(arguments.device),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "file": {"format": arguments.format, "bytes": size},
        "read_gb_per_second": size / 1e9 / middle["read"],
        "over_reading": {
            "load": middle["seconds"] / middle["read"],
            "hash": middle["hash"] / middle["read"],
            "kept_hash": middle["kept_hash"] / middle["read"],
        },
        "peak_over_weights": peak / rounds[0]["weight_bytes"],
        "rounds": rounds,
    }
    print_and_write(report, arguments.out or RESULTS / f"loading_{entry.name}.json")


if __name__ == "__main__":
    main()
