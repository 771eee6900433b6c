"""Embeddings files: virnuc's own HDF5, and files of other programs (docs/formats.md)."""

import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, get_args

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import (
    CHECKSUM_SUFFIX,
    HDF5_ERRORS,
    ArrayDigest,
    plain_attributes,
    read_attributes,
    recognise_hdf5,
    stored_dataset,
)
from virnuc_core.errors import DamagedFileError, InputError, UsageError
from virnuc_core.inference.shard import VECTOR_DATASETS
from virnuc_core.plain_text import cell_text
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import CODE_WIDTH, FrameRule

if TYPE_CHECKING:
    import pandas as pd

IDS: Final = {"predict": "frame_ids", "embed": "ids"}
EMBED_VECTORS: Final = "embeddings"
FEATURES: Final = "vectors"  # both models side by side, in files of other programs
LENGTHS: Final = "lengths"
SCORES: Final = "scores"
CODES: Final = "codes"  # of rows, by a head for the longest ORFs
STARTS: Final = "starts"
SIZES: Final = "sizes"  # see `FrameStore.sizes`
FRAMES: Final = "frames"  # attribute: the FrameRule of the rows
MATRICES: Final = (*VECTOR_DATASETS.values(), EMBED_VECTORS, FEATURES)

_EXPECTED: Final = (
    "give the embeddings.h5 of a predict run, the file of an embed run, or the *_merged.pt of VirNucPro"
)

_log = logging.getLogger(__name__)


class Embeddings:
    """An embeddings file open for reading; close it, or use it in a `with` block.

    Attributes:
        attrs: its metadata: models, precision, pooling, checksums.
        kind: "predict" if its rows are frames, "embed" if they are sequences.
    """

    def __init__(self, path: str | Path, *, own: bool = False) -> None:
        """Opens the file, with a warning if it has no checksums; `own` accepts only virnuc's own unmodified files.

        Raises:
            InputError: the file does not exist.
            DamagedFileError: it is not an embeddings file, or is incomplete.
            CheckpointError: it is a torch file that holds more than tensors and names.
        """
        self.path = Path(path)
        read = _read_own_hdf5 if own else _reader_of(self.path)
        with _reading(self.path):
            self._file, self._datasets, self.attrs = read(self.path)
            self.kind = "embed" if EMBED_VECTORS in self._datasets else "predict"
            self._ids = next((name for name in IDS.values() if name in self._datasets), "")
            if not self._ids:
                raise ValueError("it has no frame_ids or ids")
            self._num_rows = len(self._datasets[self._ids])
            for name, values in self._datasets.items():
                _require_form(name, values, self._num_rows)
        if read is not _read_own_hdf5:
            _log.warning(
                "%s has no virnuc checksums: changed values would go unnoticed.",
                path,
            )
        elif not own and not all(data.fletcher32 or not data.size for data in self._datasets.values()):
            self.verify()  # rewritten by another program, without the checksums that HDF5 verifies when reading

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._num_rows

    def __contains__(self, name: str) -> bool:
        return name in self._datasets

    def __repr__(self) -> str:
        return f"<{self.kind} embeddings, {len(self)} rows of {', '.join(self.datasets)}: {self.path}>"

    def close(self) -> None:
        """Closes the file; ids, scores and vectors that were already read remain valid."""
        if self._file is not None:
            self._file.close()
        self._datasets = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All datasets, including ids and scores."""
        return tuple(self._datasets)

    @property
    def datasets(self) -> tuple[str, ...]:
        """Matrices of vectors: `dna`, `protein` (predict), `embeddings` (embed), or `vectors` of both models (other programs)."""
        return tuple(name for name in MATRICES if name in self)

    @cached_property
    def ids(self) -> list[str]:
        """One per row: `CONTIG_chunk_NFRAME` in a predict run, the sequence name in an embed run."""
        return self.read_ids(0, len(self))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """int64 (N,), residues or bases of each sequence; None for a predict run."""
        return self._all(LENGTHS)

    @cached_property
    def scores(self) -> npt.NDArray[np.float32] | None:
        """float32 (N, 2), P(other) and P(virus); None where the file has none, as for an embed run."""
        return self._all(SCORES)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64] | None:
        """int64 (N,), first base of each ORF, from 0, on its strand of the chunk; None for other rows."""
        return self._all(STARTS)

    def _all(self, name: str) -> npt.NDArray[Any] | None:
        return self.rows(name, 0, len(self)) if name in self else None

    @property
    def frames(self) -> FrameRule:
        """What its rows are of chunks; without a statement, as in files of other programs, open frames.

        Raises:
            DamagedFileError: it states something else.
        """
        frames: FrameRule = self.attrs.get(FRAMES, "open")
        if frames not in get_args(FrameRule):
            raise DamagedFileError(
                f"embeddings file {self.path}: its attribute {FRAMES!r} is {frames!r:.40}, not open or longest."
            )
        return frames

    @property
    def vectors(self) -> "Rows":
        """All vectors of a row side by side, (N, D): DNA before protein, the input of a classifier head.

        Raises:
            UsageError: the run has kept no vectors.
        """
        return self.matrix()

    def matrix(self, name: str | None = None) -> "Rows":
        """One of the matrices named in `datasets`, (N, D); None concatenates all of them along the columns.

        Raises:
            UsageError: there is no such matrix.
        """
        names = self.datasets if name is None else (name,)
        if not names or not set(names) <= set(self.datasets):
            there = f"only {' and '.join(self.datasets)}" if self.datasets else "none, only scores"
            raise UsageError(
                f"{self.path} contains no {name or ''} embeddings ({there}): repeat the run with them, or choose others."
            )
        return Rows(self, {part: self._datasets[part] for part in names})

    def as_dataframe(self, *, vectors: bool = False) -> "pd.DataFrame":
        """A table with one row per id, indexed by `id`.

        A predict run has the columns `contig`, `chunk`, `frame`, `p_other` and `p_virus`, and `start` for ORFs, an
        embed run `length`. With `vectors`, each vector component is a column, too: `dna_0`, ..., `protein_0`, ...
        """
        import pandas as pd  # slow

        columns: dict[str, Any] = {}
        if self.kind == "embed":
            columns |= {} if self.lengths is None else {"length": self.lengths}
        else:
            frame_id = re.compile(
                rf"(?P<contig>.*)_chunk_(?P<chunk>[0-9]+)(?P<frame>{'|'.join(FRAME_NAMES)})", re.DOTALL
            )
            parts = [frame_id.fullmatch(name) for name in self.ids]
            columns["contig"] = [p["contig"] if p else name for p, name in zip(parts, self.ids, strict=True)]
            columns["chunk"] = [int(part["chunk"]) if part else 0 for part in parts]
            columns["frame"] = [part["frame"] if part else "" for part in parts]
            columns |= {} if self.starts is None else {"start": self.starts}
            if self.scores is not None:
                columns |= {"p_other": self.scores[:, 0], "p_virus": self.scores[:, 1]}
        if vectors:
            for part in self.matrix().names:
                columns |= {
                    f"{part}_{number}": column for number, column in enumerate(self.matrix(part)[:].T)
                }
        return pd.DataFrame(columns, index=pd.Index(self.ids, name="id"))

    def read_ids(self, begin: int, end: int) -> list[str]:
        """Ids of the rows begin..end-1.

        Raises:
            DamagedFileError: they cannot be read.
        """
        names = self.rows(self._ids, begin, end).tolist()
        with _reading(self.path):
            return [cell_text(name.decode() if isinstance(name, bytes) else name) for name in names]

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows begin..end-1 of a dataset.

        Raises:
            DamagedFileError: they cannot be read, or there is no such dataset.
        """
        with _reading(self.path):
            dataset = self._datasets[name]
            is_text = isinstance(dataset, h5py.Dataset) and dataset.dtype.kind == "O"
            return self._read_texts(dataset, begin, end) if is_text else np.asarray(dataset[begin:end])

    def _read_texts(self, texts: h5py.Dataset, begin: int, end: int) -> npt.NDArray[Any]:
        """Reads text of any length in steps: any number of rows may point to one text, which may be long."""
        left = self.path.stat().st_size - sum(
            dataset.id.get_storage_size() for dataset in self._datasets.values()
        )
        step = max(1, (1 << 28) // max(1, left))
        parts = [np.empty(0, object)]
        for first in range(begin, end, step):
            parts.append(texts[first : min(first + step, end)])
            left -= sum(map(len, parts[-1]))
            if left < 0:
                raise ValueError("its names are larger in memory than in the file")
        return np.concatenate(parts)

    def verify(self) -> None:
        """Reads every value and compares each dataset with its checksum.

        Raises:
            DamagedFileError: a dataset cannot be read, or has changed since it was written.
        """
        for name, dataset in self._datasets.items():
            digest = ArrayDigest(dataset.dtype, dataset.shape)
            for begin in range(0, len(self), 4096):
                digest.add(self.rows(name, begin, begin + 4096))
            if self.attrs.get(name + CHECKSUM_SUFFIX) != digest.value:
                raise DamagedFileError(
                    f"embeddings file {self.path}: the checksum of {name!r} does not match: recreate the file."
                )


class Rows:
    """A matrix (N, D) in an embeddings file, of one or more datasets side by side; rows are read when indexed.

    `rows[5]` is a vector; slices, lists of numbers and masks give matrices; `np.asarray(rows)` reads everything.
    """

    def __init__(self, file: Embeddings, datasets: dict[str, Any]) -> None:
        self.names = tuple(datasets)
        self.shape = (len(file), sum(data.shape[1] for data in datasets.values()))
        self.dtype = np.result_type(*(data.dtype for data in datasets.values()))
        self._file = file
        self._datasets = tuple(datasets.values())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reads rows.

        Raises:
            IndexError: there are no such rows.
            DamagedFileError: they cannot be read.
        """
        rows = np.arange(len(self))[key]
        if rows.ndim > 1:
            raise IndexError("select rows by a number, a slice, a list of numbers or a mask")
        parts = [self._read(data, rows.reshape(-1)) for data in self._datasets]
        values = parts[0] if len(parts) == 1 else np.hstack(parts)
        return values if rows.ndim else np.asarray(values[0])

    def _read(self, data: Any, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        with _reading(self._file.path):
            if len(rows) and (np.diff(rows) == 1).all():
                return np.asarray(data[rows[0] : rows[-1] + 1])
            distinct, inverse = np.unique(rows, return_inverse=True)  # HDF5 wants ascending, distinct rows
            return np.asarray(data[distinct][inverse])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{' and '.join(self.names)}: {self.shape[0]} x {self.shape[1]} {self.dtype}, in {self._file.path}>"


# The open file, its datasets, and its attributes.
_Content = tuple[h5py.File | None, dict[str, Any], dict[str, Any]]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (*HDF5_ERRORS, EOFError, zipfile.BadZipFile) as error:
        raise DamagedFileError(
            f"embeddings file {path} cannot be read ({error}): recreate the file."
        ) from error


def _reader_of(path: Path) -> Callable[[Path], _Content]:
    if not os.path.exists(path):
        raise InputError(f"embeddings file {path} does not exist: {_EXPECTED}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: {_EXPECTED}.")
    found = "neither an HDF5 nor a torch file"
    if h5py.is_hdf5(path):
        found = recognise_hdf5(path)
        if found == "embeddings file":
            return _read_own_hdf5
        if found == "HDF5 file not written by virnuc":
            with _reading(path), h5py.File(path, "r") as file:
                if not file.keys().isdisjoint(IDS.values()) and not file.keys().isdisjoint(MATRICES):
                    return _read_foreign_hdf5
    else:
        with path.open("rb") as file:
            first = file.read(1)
        if first == b"\x80" or zipfile.is_zipfile(path):
            return _read_virnucpro
    raise DamagedFileError(f"{path} is a {found}, not a complete embeddings file: {_EXPECTED}.")


def _read_own_hdf5(path: Path) -> _Content:
    file = h5py.File(path, "r")
    attributes = read_attributes(file)
    return file, {name: stored_dataset(file, name) for name in file}, attributes


def _read_foreign_hdf5(path: Path) -> _Content:
    """Reads another program's HDF5: ids may be text of any length, and unknown datasets are ignored."""
    file = h5py.File(path, "r")
    ids = next(name for name in IDS.values() if name in file)
    known = (ids, *MATRICES, LENGTHS, SCORES, CODES, STARTS, SIZES)
    datasets = {name: stored_dataset(file, name, text=name == ids) for name in file if name in known}
    return file, datasets, plain_attributes(file)


def _read_virnucpro(path: Path) -> _Content:
    """Reads features of VirNucPro: one row per frame, DNA before protein.

    Source: `merge_data` in VirNucPro's units.py, which saves {"ids": list of str, "data": tensor}, and "labels" for training.
    """
    import torch

    from virnuc_core.models.tensor_files import read_pickle, require_backed

    content = read_pickle(path)
    if not isinstance(content, dict) or not {"ids", "data"} <= content.keys():
        raise ValueError("it contains neither ids nor data of merged features")
    ids, data = content["ids"], content["data"]
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ValueError("ids is not a list of names")
    if not isinstance(data, torch.Tensor) or data.ndim != 2 or not data.is_floating_point():
        raise ValueError("data is not a numeric matrix")
    if len(ids) != len(data):
        # VirNucPro keeps the ids of frames with incomplete features, but not their rows.
        raise ValueError(f"it has {len(ids)} ids but {len(data)} rows")
    require_backed(path, [data])
    has_numpy_type = data.dtype in (torch.float16, torch.float32, torch.float64)
    matrix = (data if has_numpy_type else data.float()).detach().numpy()
    return None, {IDS["predict"]: np.array(ids, object), FEATURES: matrix}, {}


def _require_form(name: str, values: h5py.Dataset | npt.NDArray[Any], num_rows: int) -> None:
    """Raises ValueError unless rows, dimensions and dtype are those that a dataset of this name must have."""
    forms = {**dict.fromkeys(IDS.values(), ("SUO", 1)), LENGTHS: ("i", 1), STARTS: ("i", 1), SIZES: ("i", 2)}
    kinds, dimensions = forms.get(name, ("f", 2))
    is_of_form = values.ndim == dimensions and len(values) == num_rows and values.dtype.kind in kinds
    widths = {SCORES: 2, SIZES: 2, CODES: CODE_WIDTH}
    if not is_of_form or (name in widths and values.shape[1] != widths[name]):
        raise ValueError(f"{name!r} has the wrong shape or type")
