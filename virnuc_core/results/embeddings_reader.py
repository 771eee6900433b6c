"""Embeddings for reading, whoever wrote them; the format is recognised by the content of the file.

docs/formats.md says what each format must hold.
"""

import json
import logging
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import HDF5_ERRORS, has_checksums, recognise_hdf5
from virnuc_core.errors import DamagedFileError, InputError
from virnuc_core.plain_text import cell_text
from virnuc_core.results.embeddings_file import (
    DATASETS,
    EMBED_VECTORS,
    FEATURES,
    IDS,
    VECTORS,
    EmbeddingsFile,
    kind_of,
    require_form,
)

_ADVICE: Final = (
    "give the embeddings.h5 of a predict run, the file of an embed run, an .npz with ids and vectors, or the "
    "*_merged.pt of VirNucPro"
)
_READ_BYTES: Final = 1 << 20
# A compressed array may be this large, or this many times its size on the disk.
_MOST_UNPACKED: Final = 1 << 30
_MOST_BYTES_A_BYTE: Final = 20
_NPY_HEADERS: Final[dict[tuple[int, int], Callable[[IO[bytes]], Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LOCAL_HEADER: Final = struct.Struct("<26x2H")  # lengths of the name and of the extra field
_DAMAGE: Final = (*HDF5_ERRORS, EOFError, SyntaxError, struct.error, zipfile.BadZipFile, zlib.error)
# About a million names; torch.save writes them all into one pickle.
_MOST_NAMES_BYTES: Final = 1 << 26

_log = logging.getLogger(__name__)


class EmbeddingsReader(Protocol):
    """An embeddings file that is open for reading.

    Attributes:
        path: the file.
        attributes: what it says of itself.
        num_rows: rows of every dataset.
        kind: `predict` for rows that are frames, `embed` for rows that are sequences.
    """

    path: Path
    attributes: dict[str, Any]
    num_rows: int
    kind: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __contains__(self, name: str) -> bool: ...

    def ids(self, begin: int, end: int) -> list[str]:
        """The ids of the rows begin..end-1."""

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """The rows begin..end-1 of a dataset."""

    def form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of a dataset."""

    def pick(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows of a dataset, in any order and as often as they are named."""


def open_reader(path: Path) -> EmbeddingsReader:
    """Opens embeddings; a warning says so when they carry no checksums.

    Raises:
        InputError: there is no such file.
        DamagedFileError: it is another kind of file, or damaged.
        CheckpointError: it is a torch file that holds more than tensors and names.
    """
    if not os.path.exists(path):
        raise InputError(f"embeddings file {path} does not exist: {_ADVICE}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: {_ADVICE}.")
    for is_format, opened in _FORMATS:
        if is_format(path):
            return opened(path)
    raise _of_another_kind(path, "file of another format than HDF5, .npz and torch")


class _ArrayReader:
    """Embeddings whose datasets are arrays in memory, or mapped into it."""

    def __init__(
        self,
        path: Path,
        ids: Sequence[str] | npt.NDArray[Any],
        arrays: dict[str, npt.NDArray[Any]],
        attributes: dict[str, Any],
    ) -> None:
        self.path = path
        self.attributes = attributes
        self.num_rows = len(ids)
        self.kind = kind_of(attributes, arrays)
        self._ids = ids
        self._arrays = arrays
        for name, values in arrays.items():
            require_form(name, values, self.num_rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays = {}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def ids(self, begin: int, end: int) -> list[str]:
        with _reading(self.path):
            names = np.asarray(self._ids[begin:end]).tolist()
            return [cell_text(name.decode() if isinstance(name, bytes) else name) for name in names]

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        return np.asarray(self._arrays[name][begin:end])

    def form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return self._arrays[name].shape, self._arrays[name].dtype

    def pick(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.asarray(self._arrays[name][rows])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DamagedFileError(f"embeddings file {path} cannot be read ({error}): {_ADVICE}.") from error


def _of_another_kind(path: Path, kind: str) -> DamagedFileError:
    return DamagedFileError(f"{path} is a {kind}, not a whole embeddings file: {_ADVICE}.")


def _note_no_checksums(path: Path) -> None:
    _log.warning(
        "%s carries no checksums of virnuc: if its numbers were altered, nothing here would notice.", path
    )


def _open_hdf5(path: Path) -> EmbeddingsReader:
    kind = recognise_hdf5(path)
    if kind in ("shard", "damaged HDF5 file"):
        raise _of_another_kind(path, kind)
    if has_checksums(path):
        file = EmbeddingsFile(path)
        file.verify_unguarded()
        return file
    with _reading(path), h5py.File(path, "r") as content:
        names = set(content)
    if not names & set(IDS.values()) or not names & {*VECTORS.values(), EMBED_VECTORS, FEATURES}:
        raise _of_another_kind(path, kind)
    _note_no_checksums(path)
    return EmbeddingsFile(path, sealed=False)


def _is_npz(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with _reading(path), zipfile.ZipFile(path) as archive:
        return all(name.endswith(".npy") for name in archive.namelist())


def _open_npz(path: Path) -> EmbeddingsReader:
    """An archive of `numpy.savez`, or one that `virnuc export` wrote."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        wanted = {*IDS.values(), *DATASETS, "attributes"}
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        arrays = {name: _npy_array(path, archive, members[name]) for name in members if name in wanted}
        found = [arrays.pop(name) for name in IDS.values() if name in arrays]
        if not found:
            raise ValueError("it has no ids")
        ids = found[0]
        if ids.ndim != 1 or ids.dtype.kind not in "US":
            raise ValueError("'ids' has another form than it must have")
        attributes = json.loads(str(arrays.pop("attributes", "{}")))
        vectors = arrays.get(FEATURES)
        if vectors is not None and attributes.get("kind") == "embed":
            arrays[EMBED_VECTORS] = arrays.pop(FEATURES)
        elif vectors is not None and vectors.ndim == 2:
            widths = [attributes.get(f"{name}_embedding_dim", 0) for name in VECTORS.values()]
            if sum(widths) == vectors.shape[1]:
                del arrays[FEATURES]
                arrays |= zip(VECTORS.values(), np.split(vectors, widths[:1], axis=1), strict=True)
        if not {*VECTORS.values(), EMBED_VECTORS, FEATURES} & set(arrays):
            raise ValueError("it has no vectors")
        reader = _ArrayReader(path, ids, arrays, attributes)
    _note_no_checksums(path)
    return reader


def _npy_array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """An array of the archive: mapped into memory, or unpacked where it is compressed.

    Raises:
        ValueError: it holds Python objects, or is not what it declares.
    """
    with archive.open(member) as file:
        shape, is_fortran, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
        if dtype.hasobject:
            raise ValueError(
                f"{member.filename} holds Python objects, which could run code: save text and numbers"
            )
        begin = file.tell()
        if prod(shape) * dtype.itemsize != member.file_size - begin:
            raise ValueError(f"{member.filename} declares another size than it has")
        if member.compress_type != zipfile.ZIP_STORED:
            if member.file_size > max(_MOST_UNPACKED, _MOST_BYTES_A_BYTE * member.compress_size):
                raise ValueError(f"{member.filename} is much larger in memory than in the file")
            values = np.frombuffer(file.read(), dtype)
            return values.reshape(shape, order="F" if is_fortran else "C")
        while file.read(_READ_BYTES):  # the end of a member is where zipfile compares its CRC
            pass
    if not prod(shape):
        return np.empty(shape, dtype)
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        begin += raw.tell() + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size)))
    return np.memmap(path, dtype, "r", begin, shape, "F" if is_fortran else "C")


def _is_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(path)


def _open_virnucpro(path: Path) -> EmbeddingsReader:
    """Features of VirNucPro, one row a frame, DNA before protein.

    Source: `merge_data` in VirNucPro's units.py, which saves {"ids": list of str, "data": tensor}, and "labels" for
    training.
    """
    import torch

    from virnuc_core.models.tensor_files import read_pickle, require_backed

    content = read_pickle(path, max_pickle_bytes=_MOST_NAMES_BYTES)
    with _reading(path):
        if not isinstance(content, dict) or not {"ids", "data"} <= content.keys():
            raise ValueError("it holds neither ids nor data of merged features")
        ids, data = content["ids"], content["data"]
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise ValueError("ids is no list of names")
        if not isinstance(data, torch.Tensor) or data.ndim != 2 or not data.is_floating_point():
            raise ValueError("data is no matrix of numbers")
        if len(ids) != len(data):
            # Ids of frames whose features were incomplete are kept there, but not their rows.
            raise ValueError(
                f"it has {len(ids)} ids and {len(data)} rows, so nobody knows which belong together"
            )
        require_backed(path, [data])
        has_numpy_type = data.dtype in (torch.float16, torch.float32, torch.float64)
        matrix = (data if has_numpy_type else data.float()).detach().numpy()
        reader = _ArrayReader(path, ids, {FEATURES: matrix}, {})
    _note_no_checksums(path)
    return reader


# How the content of a format is recognised, and what opens it.
_FORMATS: Final[tuple[tuple[Callable[[Path], bool], Callable[[Path], EmbeddingsReader]], ...]] = (
    (h5py.is_hdf5, _open_hdf5),
    (_is_npz, _open_npz),
    (_is_pickled, _open_virnucpro),
)
