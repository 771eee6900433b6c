"""Chunks and frames are byte-identical to the original program's."""

import gzip
from pathlib import Path

import pytest

from virnuc_core.sequences.frame_store import FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import iter_records


@pytest.fixture
def golden(data_dir: Path) -> Path:
    return data_dir / "golden" / "frames"


@pytest.fixture(params=[300, 500])
def store(request: pytest.FixtureRequest, golden: Path, tmp_path: Path) -> FrameStore:
    return build_frame_store([golden / "input.fa.gz"], tmp_path / "frames", request.param)


def test_chunks_are_those_of_the_original(store: FrameStore, golden: Path) -> None:
    sequences = [record.sequence.decode() for record in iter_records([golden / "input.fa.gz"], "dna")]
    table = [
        f"{name}\t{sequences[record][start:end]}"
        for name, record, start, end in zip(
            store.chunk_id_column(0, store.num_chunks).to_pylist(),
            store.chunk_record,
            store.chunk_start,
            store.chunk_end,
            strict=True,
        )
    ]
    with gzip.open(golden / f"chunks_{store.meta.chunk_length}.tsv.gz", "rt") as file:
        expected = [line.rstrip("\n").split("\t") for line in file][1:]
    # The original converts to upper case after chunking.
    assert table == [f"{name}\t{sequence.upper()}" for name, sequence in expected]


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_frames_are_byte_equal_to_the_original(
    store: FrameStore, golden: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"frames{suffix}"
    write_frames_tsv(store, path)
    written = gzip.decompress(path.read_bytes()) if suffix == ".tsv.gz" else path.read_bytes()
    assert written == gzip.decompress((golden / f"expected_{store.meta.chunk_length}.tsv.gz").read_bytes())
