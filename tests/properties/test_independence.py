"""Results of a contig are bit-identical whatever else is in the file, in any order and in shards of any size.

tests/unit/inference/test_lanes.py shows the same for any number of lanes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import h5py
import pyarrow.parquet as pq
import pytest

from tests.made_models import MadeModels, make_models
from virnuc_core.api import predict
from virnuc_core.run_folder import RunFolder

Records = list[tuple[str, str]]


def random_records(name: str, lengths: range) -> Records:
    return [(f"{name}{length}", "".join(Random(length).choices("ACGT", k=length))) for length in lengths]


RECORDS = random_records("contig", range(20, 400, 10))
OTHERS = random_records("other", range(40, 310, 9))
WAYS: dict[str, Callable[[Records], Records]] = {
    "in the opposite order": lambda records: records[::-1],
    "without every other one": lambda records: records[1::2],
    "alone": lambda records: records[17:18],
    "after others": lambda records: OTHERS + records,
    "among others": lambda records: [one for pair in zip(records, OTHERS, strict=False) for one in pair],
}


@pytest.fixture(scope="module", params=["open", "longest"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    """Models and a head for open reading frames, or for the longest ORFs."""
    models = make_models(tmp_path_factory.mktemp("made"))
    return models if request.param == "open" else replace(models, head=models.longest_head)


@pytest.fixture(scope="module")
def expected(made: MadeModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    return computed(made, RECORDS, tmp_path_factory.mktemp("expected"))


def computed(
    made: MadeModels, records: Records, scratch: Path, shard_seconds: float = 0.05
) -> dict[str, list[bytes]]:
    """Per contig: its lines of the tables, and the vectors and scores of its frames."""
    folder = RunFolder(scratch / "run")
    models = {"esm_model": str(made.esm2), "dnabert_model": str(made.dnabert), "head": str(made.head)}
    settings: dict[str, Any] = {
        "chunk_length": 60,
        "devices": ("cpu",),
        "shard_seconds": shard_seconds,
        "relaxed": True,
    }
    predict(records, out=folder.root, **models, **settings)
    found: dict[str, list[bytes]] = {name: [] for name, _ in records}
    for line in folder.chunks.read_text().splitlines()[1:]:
        found[line.split("\t")[0]].append(line.encode())
    # Numbers of chunks are not rounded in these.
    for path in (folder.chunks_parquet, folder.contigs_parquet, folder.summary_parquet):
        for cells in pq.read_table(path).to_pylist():
            # These are of the whole sample.
            cells = {name: cell for name, cell in cells.items() if name not in ("confidence", "fdr")}
            found[cells["seq_name"].split("|provirus_")[0]].append(repr(cells).encode())
    with h5py.File(folder.embeddings) as h5:
        columns = [h5[name][:] for name in ("dna", "protein", "scores")]
        for row, frame in enumerate(h5["frame_ids"].asstr()[:]):
            values = b"".join(column[row].tobytes() for column in columns)
            found[frame.split("_chunk_")[0]].append(frame.encode() + values)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_of_other_records_and_their_order(
    way: str, made: MadeModels, expected: dict[str, list[bytes]], tmp_path: Path
) -> None:
    found = computed(made, WAYS[way](RECORDS), tmp_path)
    of_both = found.keys() & expected.keys()
    assert of_both
    assert {name: found[name] for name in of_both} == {name: expected[name] for name in of_both}


@pytest.mark.parametrize("shard_seconds", [0.0005, 10.0])
def test_of_shards(
    shard_seconds: float, made: MadeModels, expected: dict[str, list[bytes]], tmp_path: Path
) -> None:
    assert computed(made, RECORDS, tmp_path, shard_seconds=shard_seconds) == expected
