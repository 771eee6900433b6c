"""HDF5 files with checksums over attributes and datasets, to detect any corruption."""

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

SCHEMA_VERSION: Final = 3
# h5py raises any of these on a corrupt file, depending on the byte.
HDF5_ERRORS: Final = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
CHECKSUM_SUFFIX: Final = "_sha256"
_CHECKSUM: Final = f"attributes{CHECKSUM_SUFFIX}"


@contextmanager
def new_hdf5(path: Path) -> Iterator[h5py.File]:
    """A new HDF5 file, complete when the block exits without an error.

    Raises:
        OSError: a write failed, whichever error HDF5 or the block raised because of it.
    """
    with _Sink(path) as sink:
        try:
            # Fixed, for checksummed metadata and bytes that do not depend on the h5py version.
            with h5py.File(sink, "w", libver=("v110", "v110")) as file:
                yield file
        finally:
            if sink.error is not None:
                raise sink.error


class _Sink(io.FileIO):
    """Hides failed writes from HDF5, which may abort the process over them; `error` is the first failure."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:  # type: ignore[override]  # what h5py gives it
        left = memoryview(data)
        try:
            while left and self.error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self.error is None else 0
        except OSError as error:
            self.error = error
            return 0


def stored_dataset(file: h5py.File, name: str, *, text: bool = False) -> h5py.Dataset:
    """A 1-D or 2-D dataset of numbers or fixed-length strings (`text`: of any length), stored in the file itself.

    Raises:
        ValueError: it is a link, of another type, or declares a shape that is not stored.
    """
    # Links may lead to other files.
    dataset = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if (
        not isinstance(dataset, h5py.Dataset)
        or dataset.ndim not in (1, 2)
        or not (dataset.dtype.kind in "fiS" or (text and h5py.check_string_dtype(dataset.dtype)))
    ):
        raise ValueError(f"{name!r} is not a dataset of numbers or names")
    if dataset.chunks:
        num_chunks = prod(map(ceil, np.divide(dataset.shape, dataset.chunks)))
        is_stored = dataset.id.get_num_chunks() == num_chunks
    else:
        is_stored = dataset.id.get_storage_size() >= dataset.nbytes
    itemsize = dataset.dtype.itemsize
    is_bounded = (
        prod(dataset.chunks or ()) * itemsize <= 1 << 22 and prod(dataset.shape[1:]) * itemsize <= 1 << 16
    )
    if dataset.external or dataset.is_virtual or not is_stored or not is_bounded:
        raise ValueError(f"{name!r} is larger in memory than in the file")
    return dataset


def recognise_hdf5(path: Path) -> str:
    """What an HDF5 file is, by the names of its attributes: only virnuc writes checksums.

    "shard", "embeddings file", "HDF5 file not written by virnuc" or "damaged HDF5 file".
    """
    try:
        with h5py.File(path, "r") as file:
            names = set(file.attrs)
    except HDF5_ERRORS:
        return "damaged HDF5 file"
    if not any(name.endswith(CHECKSUM_SUFFIX) for name in names):
        return "HDF5 file not written by virnuc"
    return "shard" if "begin" in names else "embeddings file"


class ArrayDigest:
    """SHA-256 over dtype, shape and values of an array that is added in slices along its first dimension."""

    def __init__(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
        self._digest = hashlib.sha256(f"{np.dtype(dtype).str} {shape}".encode())

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Adds the next rows."""
        self._digest.update(np.ascontiguousarray(rows).view(np.uint8).data)

    @property
    def value(self) -> str:
        """The digest in hexadecimal."""
        return self._digest.hexdigest()


def array_sha256(array: npt.NDArray[Any]) -> str:
    """`ArrayDigest` of all rows at once."""
    digest = ArrayDigest(array.dtype, array.shape)
    digest.add(array)
    return digest.value


def write_attributes(file: h5py.File, attributes: dict[str, str | int]) -> None:
    """Writes root attributes and their checksum."""
    for name in sorted(attributes):
        file.attrs[name] = attributes[name]
    file.attrs[_CHECKSUM] = _attributes_sha256(attributes)


def read_attributes(file: h5py.File) -> dict[str, Any]:
    """Reads the root attributes.

    Raises:
        ValueError: their checksum is missing or wrong, or the schema version differs.
    """
    attributes = plain_attributes(file)
    if attributes.pop(_CHECKSUM, None) != _attributes_sha256(attributes):
        raise ValueError("the checksum of its attributes does not match")
    if attributes["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {attributes['schema_version']}; this virnuc reads {SCHEMA_VERSION}")
    return attributes


def attributes_sha256(path: Path) -> str:
    """The checksum of the root attributes of a file of virnuc's, among which are those of its datasets."""
    with h5py.File(path, "r") as file:
        return str(file.attrs[_CHECKSUM])


def plain_attributes(file: h5py.File) -> dict[str, Any]:
    """The root attributes of any file that are text or scalars."""
    values = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in file.attrs.items()
    }
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def _attributes_sha256(attributes: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()
