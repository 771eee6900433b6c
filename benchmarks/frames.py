"""Speed of reading, of chunking with six-frame translation, and of building a whole frame store, on one core.

    python -m benchmarks.frames [FASTA...]

Writes benchmarks/results/frames.json. Always measured: random sequence, of which almost no frame is open, and
sequence without T, of which every frame is open; real genomes, given as files, lie between. Input is cut after
40 Mbp. The time is processor time, since other programs may run.
"""

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.reports import print_and_write
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.frames import chunk_table, open_frames
from virnuc_core.sequences.reader import iter_records

CHUNK_LENGTHS = (300, 500)
MAX_BASES = 40_000_000
BATCH_BASES = 1 << 20
REPEATS = 3


def best_speed(bases: int, work: Callable[[], object]) -> float:
    """Mbp a second of processor time, the fastest of some runs; everything here runs in one thread."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return round(bases / min(seconds) / 1e6, 1)


def batches_of(sequences: list[bytes]) -> list[ByteColumn]:
    """Groups of sequences of about the size that the frame store works on at once."""
    batches, batch, bases = [], [], 0
    for sequence in sequences:
        batch.append(sequence)
        bases += len(sequence)
        if bases >= BATCH_BASES:
            batches.append(ByteColumn.from_strings(batch))
            batch, bases = [], 0
    return [*batches, ByteColumn.from_strings(batch)] if batch else batches


def chunk_and_translate(batches: list[ByteColumn], chunk_length: int) -> tuple[int, int]:
    """Numbers of chunks and of open frames."""
    num_chunks = num_frames = 0
    for batch in batches:
        table = chunk_table(batch.lengths, chunk_length)
        offset = batch.offsets[table.record]
        num_frames += len(open_frames(batch.data, offset + table.start, offset + table.end))
        num_chunks += len(table)
    return num_chunks, num_frames


def measure(sequences: list[bytes], scratch: Path) -> dict[str, object]:
    """All speeds for one set of sequences."""
    bases = sum(map(len, sequences))
    fasta = scratch / "input.fa"
    with open(fasta, "wb") as file:
        for number, sequence in enumerate(sequences):
            lines = [sequence[begin : begin + 80] for begin in range(0, len(sequence), 80)]
            file.write(b">s%d\n%s\n" % (number, b"\n".join(lines)))
    batches = batches_of(sequences)
    result: dict[str, object] = {
        "records": len(sequences),
        "mega_bases": round(bases / 1e6, 1),
        "read_mbp_per_s": best_speed(bases, lambda: [None for _ in iter_records([fasta], "dna")]),
    }
    for chunk_length in CHUNK_LENGTHS:
        num_chunks, num_frames = chunk_and_translate(batches, chunk_length)
        result[f"{chunk_length}_bp"] = {
            "chunks": num_chunks,
            "open_frames": num_frames,
            "chunk_and_translate_mbp_per_s": best_speed(
                bases, partial(chunk_and_translate, batches, chunk_length)
            ),
            "frame_store_mbp_per_s": best_speed(
                bases, partial(build_frame_store, [fasta], scratch / "frames", chunk_length)
            ),
        }
    return result


def random_sequences(letters_in_use: bytes) -> list[bytes]:
    """Contigs of 10 kbp, 40 Mbp in all."""
    rng = np.random.default_rng(0)
    letters = rng.choice(np.frombuffer(letters_in_use, np.uint8), (MAX_BASES // 10_000, 10_000))
    return [row.tobytes() for row in letters]


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
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fasta", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "frames.json")
    arguments = parser.parse_args()
    inputs = {
        "random, few open frames": random_sequences(b"ACGT"),
        "random without T, every frame open": random_sequences(b"ACG"),
        **{path.name: file_sequences(path) for path in arguments.fasta},
    }
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: measure(sequences, Path(scratch)) for name, sequences in inputs.items()}
    report = {
        "machine": f"{platform.machine()}, one thread",
        "numpy": np.__version__,
        "inputs": results,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
