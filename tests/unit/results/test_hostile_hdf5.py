"""HDF5 files that lie about their size or take their content from elsewhere are damaged files, and nothing else happens."""

import io
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.reliability.child import limit_memory
from benchmarks.reliability.crafted import hdf5_files
from tests.made_models import MadeModels, MadeRun
from virnuc_core.checked_hdf5 import array_sha256, write_attributes
from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.integrity import inspect_path
from virnuc_core.results.rescore import score_embeddings

Edit = Callable[[h5py.File], object]


def _replaced(name: str, make: Callable[[h5py.File, h5py.Dataset], object]) -> Edit:
    def edit(file: h5py.File) -> None:
        old = file[name]
        del file[name]
        make(file, old)

    return edit


def _virtual(file: h5py.File, old: h5py.Dataset) -> None:
    layout = h5py.VirtualLayout(old.shape, old.dtype)
    layout[:] = h5py.VirtualSource("other.h5", "dna", old.shape)
    file.create_virtual_dataset("dna", layout)


EDITS: dict[str, Edit] = {
    "external link": _replaced(
        "dna", lambda f, d: f.__setitem__("dna", h5py.ExternalLink("/etc/passwd", "/dna"))
    ),
    "soft link to itself": _replaced("dna", lambda f, d: f.__setitem__("dna", h5py.SoftLink("/dna"))),
    "soft link": _replaced("dna", lambda f, d: f.__setitem__("dna", h5py.SoftLink("/protein"))),
    "external storage": _replaced(
        "dna",
        lambda f, d: f.create_dataset(
            "dna", d.shape, d.dtype, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
        ),
    ),
    "virtual": _replaced("dna", _virtual),
    "group": _replaced("dna", lambda f, d: f.create_group("dna")),
    "text": _replaced(
        "dna", lambda f, d: f.create_dataset("dna", data=["a"] * len(d), dtype=h5py.string_dtype())
    ),
    "other rows": _replaced(
        "dna", lambda f, d: f.create_dataset("dna", data=np.zeros((len(d) + 1, d.shape[1])))
    ),
    "three dimensions": _replaced("dna", lambda f, d: f.create_dataset("dna", data=np.zeros((len(d), 2, 2)))),
    "nothing behind it": _replaced(
        "dna", lambda f, d: f.create_dataset("dna", d.shape, "f4", chunks=d.shape)
    ),
    "complex": _replaced("dna", lambda f, d: f.create_dataset("dna", data=np.zeros(d.shape, "c8"))),
}


def edited(path: Path, edit: Edit) -> bytes:
    """The file after the change, with attributes that are sealed again."""
    buffer = io.BytesIO(path.read_bytes())
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        edit(file)
        attributes = {n: v if isinstance(v, str) else int(v) for n, v in file.attrs.items()}
        del attributes["attributes_sha256"]
        write_attributes(file, attributes)
    return buffer.getvalue()


@pytest.fixture
def two_gigabytes() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", EDITS)
def test_a_shard_of_another_form(name: str, finished_run: MadeRun, tmp_path: Path) -> None:
    shard = finished_run.plan.shards[0]
    path = tmp_path / "shard.h5"
    path.write_bytes(edited(finished_run.folder.shard(shard.index), EDITS[name]))
    with pytest.raises(DamagedFileError, match="is not whole"):
        read_shard(path, shard_identity(finished_run.plan, shard))
    assert not inspect_path(path).is_complete


@pytest.mark.parametrize("name", EDITS)
def test_embeddings_of_another_form(
    name: str, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    path = tmp_path / "embeddings.h5"
    path.write_bytes(edited(finished_run.folder.embeddings, EDITS[name]))
    with pytest.raises(DamagedFileError, match="cannot be read"):
        score_embeddings(path, str(made_models.head), tmp_path / "scores.tsv")
    assert not (tmp_path / "scores.tsv").exists()
    assert not inspect_path(path).is_complete


@pytest.mark.usefixtures("two_gigabytes")
def test_declared_sizes(finished_run: MadeRun, made_models: MadeModels, tmp_path: Path) -> None:
    path = tmp_path / "embeddings.h5"
    for content in hdf5_files(finished_run.folder.embeddings.read_bytes()).values():
        path.write_bytes(content)
        with pytest.raises(DamagedFileError):
            score_embeddings(path, str(made_models.head), tmp_path / "scores.tsv")
        assert not inspect_path(path).is_complete


def test_ids_cannot_tear_the_table(finished_run: MadeRun, made_models: MadeModels, tmp_path: Path) -> None:
    path, table = tmp_path / "embeddings.h5", tmp_path / "scores.tsv"
    hostile = b"=1\t1\n\x1b[2J"

    def rename(file: h5py.File) -> None:
        rows = len(file["frame_ids"])
        del file["frame_ids"]
        file.create_dataset("frame_ids", data=np.full(rows, hostile))
        file.attrs["frame_ids_sha256"] = array_sha256(file["frame_ids"][:])

    path.write_bytes(edited(finished_run.folder.embeddings, rename))
    rows = score_embeddings(path, str(made_models.head), table)
    lines = table.read_text().splitlines()
    assert len(lines) == rows + 1
    assert {line.split("\t")[0] for line in lines[1:]} == {"%3D1%091%0A%1B[2J"}
    with Embeddings(path, own=True) as file:
        assert file.read_ids(0, 1) == ["%3D1%091%0A%1B[2J"]
