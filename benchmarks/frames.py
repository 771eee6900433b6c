"""Speed of reading, and of building a frame store, on one core.

    python -m benchmarks.frames [FASTA...]

Writes benchmarks/results/frames.json. Always measured: random sequence, with almost no stop-free frame, and sequence
without T, in which every frame is stop-free; real genomes, given as files, lie between. Input is cut after 40 Mbp. CPU
time is measured, since other programs may run.
"""

import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.reports import Json, options_of, print_and_write
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import iter_records

CHUNK_LENGTHS = (300, 500)
MAX_BASES = 40_000_000
REPEATS = 3


def best_speed(bases: int, work: Callable[[], object]) -> float:
    """Mbp per second of CPU time, best of several single-threaded runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return round(bases / min(seconds) / 1e6, 1)


def measure(sequences: list[bytes], scratch: Path) -> Json:
    """All speeds for one set of sequences."""
    bases = sum(map(len, sequences))
    fasta = scratch / "input.fa"
    with open(fasta, "wb") as file:
        for number, sequence in enumerate(sequences):
            lines = [sequence[begin : begin + 80] for begin in range(0, len(sequence), 80)]
            file.write(b">s%d\n%s\n" % (number, b"\n".join(lines)))
    result: Json = {
        "records": len(sequences),
        "mega_bases": round(bases / 1e6, 1),
        "read_mbp_per_s": best_speed(bases, lambda: [None for _ in iter_records([fasta], "dna")]),
    }
    for chunk_length in CHUNK_LENGTHS:
        build = partial(build_frame_store, [fasta], scratch / "frames", chunk_length)
        speed, store = best_speed(bases, build), build()
        result[f"{chunk_length}_bp"] = {
            "chunks": store.meta.num_chunks,
            "open_frames": store.num_frames,
            "frame_store_mbp_per_s": speed,
        }
    return result


def random_sequences(alphabet: bytes) -> list[bytes]:
    """Contigs of 10 kbp, 40 Mbp in all."""
    rng = np.random.default_rng(0)
    bases = rng.choice(np.frombuffer(alphabet, np.uint8), (MAX_BASES // 10_000, 10_000))
    return [row.tobytes() for row in bases]


def file_sequences(path: Path) -> list[bytes]:
    """The first 40 Mbp of a file."""
    sequences, bases = [], 0
    for record in iter_records([path], "dna"):
        sequences.append(record.sequence)
        bases += len(record.sequence)
        if bases >= MAX_BASES:
            break
    return sequences


def main() -> None:
    """Command line."""
    parser = options_of("frames", __doc__)
    parser.add_argument("fasta", nargs="*", type=Path)
    arguments = parser.parse_args()
    inputs = {
        "random, few stop-free frames": random_sequences(b"ACGT"),
        "random without T, every frame open": random_sequences(b"ACG"),
        **{path.name: file_sequences(path) for path in arguments.fasta},
    }
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: measure(sequences, Path(scratch)) for name, sequences in inputs.items()}
    machine = f"{platform.machine()}, one thread"
    print_and_write({"machine": machine, "numpy": np.__version__, "inputs": results}, arguments.out)


if __name__ == "__main__":
    main()
