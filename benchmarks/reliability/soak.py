"""Leaks and growth: many runs in one process, and runs over many chunks.

    python -m benchmarks.reliability.soak [--number 1000] [--chunks 5000000]

The stages of small runs follow one another in the same process, as in a worker; one run in fifty has a lane process.
Memory, open files, threads, processes and leftover files are counted. Then one run each over a hundredth, a tenth and
all of `--chunks`, with two-layer models, shows how memory grows with the number of chunks: the process's own memory,
without file pages that the system may drop at any time.
"""

import gc
import json
import multiprocessing
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.reliability.harness import main, program, say
from benchmarks.reliability.samples import CHUNK_LENGTH
from benchmarks.reliability.small_run import CONTIGS, final_files, make_inputs, run
from virnuc_core.inference.plan import read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

_RECORDS: Final = 40
_WITH_A_LANE: Final = 50
_SAMPLES: Final = 20
_CONTIG_CHUNKS: Final = 2000
# Gives about one chunk in three a stop-free frame.
_LETTER_SHARES: Final = {"A": 0.45, "C": 0.05, "G": 0.05, "T": 0.45}
_LARGE_SHARD_SECONDS: Final = 0.2


def own_memory() -> int:
    """Bytes of this process that are not file pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def state() -> dict[str, int]:
    """Resources that could leak."""
    gc.collect()
    return {
        "memory_bytes": own_memory(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children()),
    }


def soak(number: int, scratch: Path) -> dict[str, Any]:
    """Runs in sequence; the state after each twentieth of them, and what they left behind."""
    inputs, root = scratch / "inputs", scratch / "run"
    samples: list[dict[str, int]] = []
    expected: dict[str, str] = {}
    num_other = 0
    begun = time.monotonic()
    for done in range(1, number + 1):
        shutil.rmtree(root, ignore_errors=True)
        run(root, inputs, lanes=int(done % _WITH_A_LANE == 0))
        found = final_files(root)
        expected = expected or found
        num_other += found != expected
        if done % max(1, number // _SAMPLES) == 0:
            samples.append({"runs": done, **state()})
            say(samples[-1])
    # Caches fill during the first quarter.
    later = samples[len(samples) // 4 :]
    memory = [sample["memory_bytes"] for sample in later]
    runs = [sample["runs"] for sample in later]
    return {
        "runs": number,
        "seconds": round(time.monotonic() - begun, 1),
        "with_other_outputs": num_other,
        "bytes_more_each_run": round(statistics.linear_regression(runs, memory).slope)
        if len(later) > 1
        else 0,
        "open_files_more": later[-1]["open_files"] - later[0]["open_files"],
        "threads_more": later[-1]["threads"] - later[0]["threads"],
        "processes_left": samples[-1]["processes"],
        # Torch's kernel cache is there too.
        "files_left": sorted(
            path.name for path in (scratch / "tmp").iterdir() if "torchinductor" not in path.name
        ),
        "samples": samples,
    }


def write_long_contigs(path: Path, chunks: int) -> None:
    """A FASTA file of random contigs with `chunks` chunks in total."""
    draw = np.random.default_rng(0)
    letters = np.frombuffer("".join(_LETTER_SHARES).encode(), np.uint8)
    with path.open("wb") as file:
        for number, begin in enumerate(range(0, chunks, _CONTIG_CHUNKS)):
            length = min(_CONTIG_CHUNKS, chunks - begin) * CHUNK_LENGTH
            sequence = letters[draw.choice(len(letters), length, p=list(_LETTER_SHARES.values()))]
            file.write(b">contig%d\n%s\n" % (number, sequence.tobytes()))


@contextmanager
def peak_of(find: dict[str, int]) -> Iterator[None]:
    """Stores the peak memory of the block as "peak_bytes"."""
    done = threading.Event()
    find["peak_bytes"] = own_memory()

    def look() -> None:
        while not done.wait(0.02):
            find["peak_bytes"] = max(find["peak_bytes"], own_memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_large(inputs: Path, root: Path, answer: Path) -> None:
    """In a separate process: a run, and its peak memory."""
    memory: dict[str, int] = {"before_bytes": own_memory()}
    begun = time.monotonic()
    with peak_of(memory):
        run(root, inputs, shard_seconds=_LARGE_SHARD_SECONDS)
    folder = RunFolder(root)
    meta = StoreMeta.read(folder.frames)
    found = {
        "chunks": meta.num_chunks,
        "frames": meta.num_frames,
        "shards": len(read_plan(folder.plan).shards),
        "seconds": round(time.monotonic() - begun, 1),
    }
    answer.write_text(json.dumps(found | memory))


def large_runs(chunks: int, scratch: Path) -> list[dict[str, Any]]:
    """Memory of runs over a hundredth, a tenth and all of the chunks."""
    inputs, root, answer = scratch / "inputs", scratch / "run", scratch / "answer.json"
    spawn = multiprocessing.get_context("spawn")
    found = []
    for size in (chunks // 100, chunks // 10, chunks):
        write_long_contigs(inputs / CONTIGS, size)
        shutil.rmtree(root, ignore_errors=True)
        process = spawn.Process(target=run_large, args=(inputs, root, answer))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the run over {size} chunks ended with {process.exitcode}")
        found.append(json.loads(answer.read_text()))
        say(found[-1])
    return found


def measure(scratch: Path, number: int, chunks: int) -> dict[str, Any]:
    """Both parts."""
    make_inputs(scratch / "inputs", _RECORDS)
    soaked = soak(number, scratch)
    wrong = ("with_other_outputs", "processes_left", "files_left")
    return {
        "soak": soaked,
        "large": large_runs(chunks, scratch) if chunks else [],
        "failures": [name for name in wrong if soaked[name]],
    }


if __name__ == "__main__":
    parser = program(__doc__, "soak")
    parser.add_argument("--number", type=int, default=1000, help="runs one after another")
    parser.add_argument("--chunks", type=int, default=5_000_000, help="chunks of the largest run; 0 for none")
    main(parser, measure)
