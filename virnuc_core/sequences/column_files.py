"""Columns on disk: raw little-endian files that are appended to once and then memory-mapped."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from virnuc_core.atomic_write import sync_file
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import DamagedFileError


class ColumnWriter:
    """Appends to any number of columns in one folder; use as a context manager.

    A column of numbers is one file `NAME.bin`. A column of byte strings is `NAME.bin` and its offsets in
    `NAME.offsets.bin`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._string_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()
        if error is None:
            for name in self._files:
                sync_file(_file(self._folder, name))

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Appends numbers to a column; the dtype must be the same at every call."""
        if name not in self._files:
            path = _file(self._folder, name)
            self._files[name] = self._open_files.enter_context(path.open("wb"))
        self._files[name].write(np.ascontiguousarray(values).data)

    def append_strings(self, name: str, strings: ByteColumn) -> None:
        """Appends byte strings to a column."""
        offsets = strings.offsets
        if name not in self._string_bytes:
            self._string_bytes[name] = 0
            self.append(_offsets_name(name), np.zeros(1, np.int64))
        self.append(_offsets_name(name), offsets[1:] + (self._string_bytes[name] - offsets[0]))
        self.append(name, strings.data[offsets[0] : offsets[-1]])
        self._string_bytes[name] += int(offsets[-1] - offsets[0])


def map_column(folder: Path, name: str, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Memory-maps a column of numbers, read only.

    Raises:
        DamagedFileError: the file is missing or does not hold `count` values.
    """
    path, size = _file(folder, name), np.dtype(dtype).itemsize * count
    found = path.stat().st_size if path.exists() else 0
    if found != size:
        raise DamagedFileError(
            f"{path} has {found} bytes instead of {size}: the frame store is damaged. "
            f"Delete {folder} and run again."
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def map_strings(folder: Path, name: str, count: int) -> ByteColumn:
    """Memory-maps a column of byte strings, read only.

    Raises:
        DamagedFileError: one of its two files is missing or has another size than it must.
    """
    if count == 0:
        return ByteColumn.from_strings(())
    offsets = map_column(folder, _offsets_name(name), np.int64, count + 1)
    return ByteColumn(map_column(folder, name, np.uint8, int(offsets[-1])), offsets)


def _offsets_name(name: str) -> str:
    return f"{name}.offsets"


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"
