"""The file of vectors and scores in input order: names of its datasets, how it is written and read.

docs/formats.md describes the layout.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import (
    HDF5_ERRORS,
    SCHEMA_VERSION,
    ArrayDigest,
    read_attributes,
    recognise_hdf5,
    stored_dataset,
)
from virnuc_core.errors import DamagedFileError, InputError, MismatchError
from virnuc_core.plain_text import cell_text
from virnuc_core.run_plan import PlannedModel, RunPlan
from virnuc_core.specs import Family

IDS: Final = {"predict": "frame_ids", "embed": "ids"}
VECTORS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}
EMBED_VECTORS: Final = "embeddings"
LENGTHS: Final = "lengths"
SCORES: Final = "scores"
CHECKSUM_SUFFIX: Final = "_sha256"
ROWS_AT_ONCE: Final = 4096

_POOLING: Final[dict[Family, str]] = {
    "dnabert_s": "mean over all tokens, [CLS] and [SEP] included",
    "esm2": "mean over residues, BOS and EOS excluded",
}
# Kind of the values and number of dimensions of all datasets that are no vectors.
_FORMS: Final = {"ids": ("S", 1), "frame_ids": ("S", 1), LENGTHS: ("i", 1)}
_CHUNK_BYTES: Final = 1 << 20


def vectors_name(plan: RunPlan, family: Family) -> str:
    """The dataset that holds the vectors of one model."""
    return VECTORS[family] if plan.kind == "predict" else EMBED_VECTORS


def attributes_of(plan: RunPlan) -> dict[str, str | int]:
    """What the file says about how its numbers were made."""
    attributes: dict[str, str | int] = {
        "schema_version": SCHEMA_VERSION,
        "kind": plan.kind,
        "plan_fingerprint": plan.fingerprint,
        "chunk_length": plan.chunk_length or 0,
        "dtype": plan.embeddings,
        "virnuc_version": plan.virnuc_version,
    }
    if plan.head is not None:
        attributes |= {"head_name": plan.head.name, "head_fingerprint": plan.head.fingerprint}
    if plan.dna_head is not None:
        attributes |= {
            "dna_head_name": plan.dna_head.name,
            "dna_head_fingerprint": plan.dna_head.fingerprint,
        }
    for model in plan.models:
        prefix = f"{VECTORS[model.family]}_" if plan.kind == "predict" else ""
        attributes |= {prefix + name: value for name, value in _model_attributes(model).items()}
    return attributes


class EmbeddingsColumn:
    """A dataset that is filled from its first row to its last, in checksummed pieces of about 1 MB.

    Args:
        file: the file to make it in.
        name: of the dataset.
        rows: how many it is to have.
        width: of a row; 0 makes it one-dimensional.
        dtype: of the values.
    """

    def __init__(self, file: h5py.File, name: str, rows: int, width: int, dtype: Any) -> None:
        shape = (rows, width) if width else (rows,)
        row_bytes = max(1, width) * np.dtype(dtype).itemsize
        piece = (min(rows, max(1, _CHUNK_BYTES // row_bytes)), *shape[1:])
        compression = "gzip" if np.dtype(dtype).kind == "S" else None
        options = {"chunks": piece, "fletcher32": True, "compression": compression} if rows else {}
        self._dataset = file.create_dataset(name, shape, dtype, **options)
        self._digest = ArrayDigest(dtype, shape)
        self._num_rows = 0

    @property
    def checksum(self) -> str:
        """Over type, shape and all values."""
        return self._digest.value

    def append(self, values: Any) -> None:
        """Writes the next rows."""
        rows = np.asarray(values, self._dataset.dtype)
        end = self._num_rows + len(rows)
        self._dataset[self._num_rows : end] = rows
        self._digest.add(rows)
        self._num_rows = end


class EmbeddingsFile:
    """An embeddings file that is open for reading; every read is checked.

    Attributes:
        path: the file.
        attributes: what it says of itself.
        num_rows: rows of every dataset.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            DamagedFileError: it is missing, not whole, not an embeddings file, or of another schema.
        """
        self.path = path
        with self._reading():
            self._file = h5py.File(path, "r")
            self.attributes: dict[str, Any] = read_attributes(self._file)
            self._ids = IDS[self.attributes["kind"]]
            self._datasets = {name: stored_dataset(self._file, name) for name in self._file}
            self.num_rows = len(self._datasets[self._ids])
            for name, dataset in self._datasets.items():
                kind, dimensions = _FORMS.get(name, ("f", 2))
                if (len(dataset), dataset.dtype.kind, dataset.ndim) != (self.num_rows, kind, dimensions):
                    raise ValueError(f"{name!r} has another form than it must have")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._datasets

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets."""
        return tuple(self._datasets)

    def ids(self, begin: int, end: int) -> list[str]:
        """The ids of the rows begin..end-1.

        Raises:
            DamagedFileError: they cannot be read.
        """
        names = self.rows(self._ids, begin, end).tolist()
        with self._reading():
            return [cell_text(name.decode()) for name in names]

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """The rows begin..end-1 of a dataset.

        Raises:
            DamagedFileError: they cannot be read, or there is no such dataset.
        """
        with self._reading():
            values: npt.NDArray[Any] = self._datasets[name][begin:end]
        return values

    def form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of a dataset."""
        return self._datasets[name].shape, self._datasets[name].dtype

    def pick(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """These rows of a dataset, in any order and as often as they are named.

        Raises:
            DamagedFileError: they cannot be read, or there is no such dataset.
        """
        distinct, places = np.unique(rows, return_inverse=True)  # HDF5 takes them ascending, each once
        with self._reading():
            values: npt.NDArray[Any] = self._datasets[name][distinct][places]
        return values

    def require_plan(self, plan: RunPlan) -> None:
        """Compares all that the file says of itself with a plan.

        Raises:
            MismatchError: it is of another run.
        """
        wanted = attributes_of(plan)
        said = {name: value for name, value in self.attributes.items() if not name.endswith(CHECKSUM_SUFFIX)}
        differing = [name for name in {**wanted, **said} if wanted.get(name) != said.get(name)]
        if differing:
            named = [name for name in differing if name != "plan_fingerprint"] or differing
            described = "; ".join(
                f"{n} is {said.get(n)} in the file and {wanted.get(n)} in the plan" for n in named
            )
            raise MismatchError(
                f"embeddings file {self.path} is of another run: {described}. Run the command that made the plan "
                "again: it writes the file from the shards."
            )

    def verify(self) -> None:
        """Reads every value and compares each dataset with its checksum.

        Raises:
            DamagedFileError: one cannot be read, or is not as it was written.
        """
        for name in self.names:
            with self._reading():
                dataset = self._datasets[name]
                digest = ArrayDigest(dataset.dtype, dataset.shape)
            for begin in range(0, self.num_rows, ROWS_AT_ONCE):
                digest.add(self.rows(name, begin, begin + ROWS_AT_ONCE))
            if self.attributes.get(name + CHECKSUM_SUFFIX) != digest.value:
                raise DamagedFileError(
                    f"embeddings file {self.path}: the checksum of {name!r} is wrong: run the command that made it again."
                )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except HDF5_ERRORS as error:
            raise DamagedFileError(
                f"embeddings file {self.path} cannot be read ({error}): run the command that made it again."
            ) from error


def require_embeddings(path: Path) -> None:
    """Refuses what is not an embeddings file by saying what it is instead.

    Raises:
        InputError: there is no such file.
        DamagedFileError: it is another kind of file, or not whole.
    """
    advice = "give the embeddings.h5 of a predict run, or the file of an embed run"
    if not os.path.exists(path):
        raise InputError(f"embeddings file {path} does not exist: {advice}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: {advice}.")
    kind = recognise_hdf5(path) if h5py.is_hdf5(path) else "file of another format than HDF5"
    if kind != "embeddings file":
        raise DamagedFileError(f"{path} is a {kind}, not a whole embeddings file: {advice}.")


def _model_attributes(model: PlannedModel) -> dict[str, str | int]:
    return {
        "model_name": model.name,
        "model_family": model.family,
        "weights_fingerprint": model.weights_fingerprint,
        "num_layers": model.spec.num_layers,
        "repr_layer": model.repr_layer,
        "embedding_dim": model.spec.embedding_dim,
        "precision": model.precision,
        "engine": model.engine,
        "token_budget": model.token_budget,
        "pooling": _POOLING[model.family],
    }
