"""Changes single bytes of shards and of embeddings.h5: each change must be found, or must not change any value.

    python -m benchmarks.reliability.flips [--number 1000]

A flipped shard is read as a run that goes on reads it. A flipped embeddings file is verified as `virnuc fsck` does, its rows
are read as `virnuc score` does, and the tables are made from it again. "harmless" counts the flips after which everything was
as before, "silent" those that changed a value without an error.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.reliability.small_run import final_files, make_material, run
from benchmarks.reports import print_and_write
from virnuc_core.errors import VirnucError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore

_RECORDS: Final = 40

Values = dict[str, Any]
Read = Callable[[Path], Values]


class Laboratory:
    """A finished run in which single bytes are changed; `ways` has the readers of each file."""

    def __init__(self, scratch: Path) -> None:
        make_material(scratch / "made", _RECORDS)
        folder = RunFolder(scratch / "run")
        run(folder.root, scratch / "made")
        self._plan = read_plan(folder.plan)
        self._store = FrameStore.open(folder.frames)
        self._tables = RunFolder(scratch / "tables")
        self._tables.root.mkdir()
        readings: dict[str, Read] = {
            "embeddings.h5, verified": self._verify,
            "embeddings.h5, rows read": self._read_rows,
            "embeddings.h5, made into tables": self._make_tables,
        }
        self.ways: dict[Path, dict[str, Read]] = {folder.embeddings: readings}
        for shard in self._plan.shards:
            self.ways[folder.shard(shard.index)] = {"shard": self._read_shard}
        self._whole = {
            path: {name: read(path) for name, read in ways.items()} for path, ways in self.ways.items()
        }

    def flip(self, path: Path, offset: int, change: int) -> dict[str, str]:
        """Outcome per reader of a changed byte: "found", "harmless" or "silent"."""
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[offset] ^= change
        path.write_bytes(flipped)
        try:
            return {name: self._outcome(path, name) for name in self.ways[path]}
        finally:
            path.write_bytes(whole)

    def _outcome(self, path: Path, name: str) -> str:
        try:
            values = self.ways[path][name](path)
        except VirnucError:
            return "found"
        return "harmless" if _equal(values, self._whole[path][name]) else "silent"

    def _read_shard(self, path: Path) -> Values:
        shard = self._plan.shards[int(path.stem.rpartition("_")[2])]
        result = read_shard(path, shard_identity(self._plan, shard))
        return {field.name: getattr(result, field.name) for field in fields(result)}

    def _verify(self, path: Path) -> Values:
        with Embeddings(path, own=True) as file:
            file.verify()
            return dict(file.attrs)

    def _read_rows(self, path: Path) -> Values:
        with Embeddings(path, own=True) as file:
            rows = {name: file.rows(name, 0, len(file)) for name in file.names}
            return {**rows, "ids": file.read_ids(0, len(file))}

    def _make_tables(self, path: Path) -> Values:
        shutil.copy(path, self._tables.embeddings)
        try:
            write_tables(self._tables, self._store)
        finally:
            self._tables.embeddings.unlink()
        return dict(final_files(self._tables.root))


def _equal(left: Values, right: Values) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(value, right[name]) if isinstance(value, np.ndarray) else value == right[name]
        for name, value in left.items()
    )


def measure(laboratory: Laboratory, number: int) -> dict[str, Any]:
    """Outcomes per reader, and the undetected flips."""
    draw = Random(0)
    files = sorted(laboratory.ways)
    sizes = {path: path.stat().st_size for path in files}
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for done in range(1, number + 1):
        # Half of them in the embeddings file, which has few of the bytes.
        path = draw.choice([file for file in files if (file.name == "embeddings.h5") == bool(done % 2)])
        # A single bit, or any change of the byte.
        offset = draw.randrange(sizes[path])
        change = 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(1, 256)
        for way, outcome in laboratory.flip(path, offset, change).items():
            outcomes[way][outcome] += 1
            if outcome == "silent":
                failures.append({"file": path.name, "offset": offset, "change": change, "way": way})
        if done % 200 == 0:
            print(f"{done} of {number}", file=sys.stderr, flush=True)
    return {
        "kind": "flips",
        "flips": number,
        "outcomes": {way: dict(counts) for way, counts in outcomes.items()},
        "silent": len(failures),
        "failures": failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=1000, help="bytes to change")
    out = Path(__file__).parents[1] / "results" / "reliability" / "flips.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="virnuc-flips-") as scratch:
        report = measure(Laboratory(Path(scratch)), arguments.number)
    print_and_write(report, arguments.out)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
