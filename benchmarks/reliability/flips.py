"""Changes single bytes of shards and of embeddings.h5: each change must be found, or must not change any value.

    python -m benchmarks.reliability.flips [--number 1000]

A flipped shard is read as a run that is resumed reads it. A flipped embeddings file is verified as `virnuc fsck` does, its
rows are read as `virnuc score` does, and the tables are made from it again. "harmless" counts the flips after which everything
was as before, "silent" those that changed a value without an error.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.reliability.harness import main, program, say
from benchmarks.reliability.small_run import SmallRun, final_files
from virnuc_core.errors import VirnucError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore

Read = Callable[[Path], dict[str, Any]]


def verified(path: Path) -> dict[str, Any]:
    """Attributes of an embeddings file that passes all its checks."""
    with Embeddings(path, own=True) as file:
        file.verify()
        return dict(file.attrs)


def rows(path: Path) -> dict[str, Any]:
    """All rows of an embeddings file."""
    with Embeddings(path, own=True) as file:
        columns = {name: file.rows(name, 0, len(file)) for name in file.names}
        return {**columns, "ids": file.read_ids(0, len(file))}


def readers_of(folder: RunFolder, scratch: Path) -> dict[Path, dict[str, Read]]:
    """The files of a finished run, and what reads each."""
    plan, store, tables = (
        read_plan(folder.plan),
        FrameStore.open(folder.frames),
        RunFolder(scratch / "tables"),
    )
    tables.root.mkdir()

    def shard(path: Path) -> dict[str, Any]:
        index = int(path.stem.rpartition("_")[2])
        return asdict(read_shard(path, shard_identity(plan, plan.shards[index])))

    def made_into_tables(path: Path) -> dict[str, Any]:
        shutil.copy(path, tables.embeddings)
        try:
            write_tables(tables, store)
        finally:
            tables.embeddings.unlink()
        return dict(final_files(tables.root))

    of_embeddings: dict[str, Read] = {
        "embeddings.h5, verified": verified,
        "embeddings.h5, rows read": rows,
        "embeddings.h5, made into tables": made_into_tables,
    }
    shards = {folder.shard(index): {"shard": shard} for index in range(len(plan.shards))}
    return {folder.embeddings: of_embeddings, **shards}


def outcome_of(read: Read, path: Path, whole: dict[str, Any]) -> str:
    """Reads a changed file: "found", "harmless" or "silent"."""
    try:
        values = read(path)
    except VirnucError:
        return "found"
    is_equal = values.keys() == whole.keys() and all(
        np.array_equal(value, whole[name]) if isinstance(value, np.ndarray) else value == whole[name]
        for name, value in values.items()
    )
    return "harmless" if is_equal else "silent"


def measure(scratch: Path, number: int) -> dict[str, Any]:
    """Outcomes per reader, and the undetected flips."""
    readers = readers_of(RunFolder(SmallRun(scratch).root), scratch)
    whole = {path: {way: read(path) for way, read in ways.items()} for path, ways in readers.items()}
    draw = Random(0)
    embeddings, *shards = readers
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for done in range(1, number + 1):
        # Half of them in the embeddings file, which has few of the bytes.
        path = embeddings if done % 2 else draw.choice(shards)
        content = path.read_bytes()
        # A single bit, or any change of the byte.
        offset = draw.randrange(len(content))
        change = 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(1, 256)
        flipped = bytearray(content)
        flipped[offset] ^= change
        path.write_bytes(flipped)
        for way, read in readers[path].items():
            outcome = outcome_of(read, path, whole[path][way])
            outcomes[way][outcome] += 1
            if outcome == "silent":
                failures.append({"file": path.name, "offset": offset, "change": change, "way": way})
                say(failures[-1])
        path.write_bytes(content)
    return {
        "flips": number,
        "outcomes": {way: dict(counts) for way, counts in outcomes.items()},
        "silent": len(failures),
        "failures": failures,
    }


if __name__ == "__main__":
    parser = program(__doc__, "flips")
    parser.add_argument("--number", type=int, default=1000, help="bytes to change")
    main(parser, measure)
