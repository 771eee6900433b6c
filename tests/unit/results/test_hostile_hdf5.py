"""HDF5 files with false sizes or external content are rejected as damaged, without side effects."""

import io
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.reliability.harness import limit_memory
from benchmarks.reliability.hostile import hdf5_files
from tests.made_models import MadeModels, MadeRun
from virnuc_core.checked_hdf5 import array_sha256, read_attributes, write_attributes
from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.integrity import inspect_path
from virnuc_core.results.rescore import score_embeddings


def virtual(file: h5py.File, shape: tuple[int, ...]) -> None:
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[:] = h5py.VirtualSource("other.h5", "dna", shape)
    file.create_virtual_dataset("dna", layout)


def zeros(extra_rows: int, *rest: int, dtype: str = "f4") -> Callable[[h5py.File, tuple[int, ...]], object]:
    return lambda file, shape: file.create_dataset(
        "dna", data=np.zeros((shape[0] + extra_rows, *rest), dtype)
    )


ELSEWHERE = [("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
# Replaces the DNA vectors of shape (n, D).
REPLACEMENTS: dict[str, Callable[[h5py.File, tuple[int, ...]], object]] = {
    "external link": lambda file, _: file.__setitem__("dna", h5py.ExternalLink("/etc/passwd", "/dna")),
    "soft link to itself": lambda file, _: file.__setitem__("dna", h5py.SoftLink("/dna")),
    "soft link": lambda file, _: file.__setitem__("dna", h5py.SoftLink("/protein")),
    "external storage": lambda file, shape: file.create_dataset("dna", shape, "f4", external=ELSEWHERE),
    "virtual": virtual,
    "group": lambda file, _: file.create_group("dna"),
    "text": lambda file, shape: file.create_dataset("dna", shape, h5py.string_dtype()),
    "other rows": zeros(1, 96),
    "three dimensions": zeros(0, 2, 2),
    "complex": zeros(0, 96, dtype="c8"),
    "nothing behind it": lambda file, shape: file.create_dataset("dna", shape, "f4", chunks=shape),
}


def edited(path: Path, edit: Callable[[h5py.File], object]) -> bytes:
    """The changed file with a valid checksum over its attributes."""
    buffer = io.BytesIO(path.read_bytes())
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        attributes = read_attributes(file)
        edit(file)
        attributes |= {name: file.attrs[name] for name in attributes if name.endswith("_sha256")}
        write_attributes(file, attributes)
    return buffer.getvalue()


@pytest.fixture
def two_gigabytes() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_datasets_of_another_form(name: str, finished_run: MadeRun, tmp_path: Path) -> None:
    def replace(file: h5py.File) -> None:
        shape = file["dna"].shape
        del file["dna"]
        REPLACEMENTS[name](file, shape)

    folder, shard, path = finished_run.folder, finished_run.plan.shards[0], tmp_path / "file.h5"
    path.write_bytes(edited(folder.shard(shard.index), replace))
    with pytest.raises(DamagedFileError, match="is not whole"):
        read_shard(path, shard_identity(finished_run.plan, shard))
    assert not inspect_path(path).is_complete
    path.write_bytes(edited(folder.embeddings, replace))
    with pytest.raises(DamagedFileError, match="cannot be read"):
        Embeddings(path)
    assert not inspect_path(path).is_complete


@pytest.mark.usefixtures("two_gigabytes")
def test_declared_sizes(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    for content in hdf5_files(finished_run.folder.embeddings.read_bytes()).values():
        path.write_bytes(content)
        with pytest.raises(DamagedFileError):
            Embeddings(path)
        assert not inspect_path(path).is_complete


def test_ids_cannot_tear_the_table(finished_run: MadeRun, made_models: MadeModels, tmp_path: Path) -> None:
    path, table = tmp_path / "embeddings.h5", tmp_path / "scores.tsv"

    def rename(file: h5py.File) -> None:
        rows = len(file["frame_ids"])
        del file["frame_ids"]
        file.create_dataset("frame_ids", data=np.full(rows, b"=1\t1\n\x1b[2J"))
        file.attrs["frame_ids_sha256"] = array_sha256(file["frame_ids"][:])

    path.write_bytes(edited(finished_run.folder.embeddings, rename))
    rows = score_embeddings(path, str(made_models.head), table)
    lines = table.read_text().splitlines()
    assert len(lines) == rows + 1
    assert {line.split("\t")[0] for line in lines[1:]} == {"%3D1%091%0A%1B[2J"}
    with Embeddings(path, own=True) as file:
        assert set(file.ids) == {"%3D1%091%0A%1B[2J"}
