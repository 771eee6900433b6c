"""The file of vectors and scores in input order: names of its datasets, how it is written and read.

docs/formats.md describes the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.errors import DamagedFileError
from virnuc_core.run_plan import PlannedModel, RunPlan
from virnuc_core.shard_file import HDF5_ERRORS, SCHEMA_VERSION, read_attributes
from virnuc_core.specs import Family

IDS: Final = {"predict": "frame_ids", "embed": "ids"}
VECTORS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}
EMBED_VECTORS: Final = "embeddings"
LENGTHS: Final = "lengths"
SCORES: Final = "scores"

_POOLING: Final[dict[Family, str]] = {
    "dnabert_s": "mean over all tokens, [CLS] and [SEP] included",
    "esm2": "mean over residues, BOS and EOS excluded",
}
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
    for model in plan.models:
        prefix = f"{VECTORS[model.family]}_" if plan.kind == "predict" else ""
        attributes |= {prefix + name: value for name, value in _model_attributes(model).items()}
    return attributes


def create_dataset(file: h5py.File, name: str, rows: int, width: int, dtype: Any) -> h5py.Dataset:
    """A dataset of so many rows in checksummed pieces of about 1 MB; `width` 0 makes it one-dimensional."""
    shape = (rows, width) if width else (rows,)
    if rows == 0:
        return file.create_dataset(name, shape, dtype)
    row_bytes = max(1, width) * np.dtype(dtype).itemsize
    piece = (min(rows, max(1, _CHUNK_BYTES // row_bytes)), *shape[1:])
    compression = "gzip" if np.dtype(dtype).kind == "S" else None
    return file.create_dataset(name, shape, dtype, chunks=piece, fletcher32=True, compression=compression)


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
            self.num_rows = len(self._file[self._ids])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets."""
        return tuple(self._file)

    def ids(self, begin: int, end: int) -> list[str]:
        """The ids of the rows begin..end-1.

        Raises:
            DamagedFileError: they cannot be read.
        """
        return [name.decode() for name in self.rows(self._ids, begin, end).tolist()]

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """The rows begin..end-1 of a dataset.

        Raises:
            DamagedFileError: they cannot be read, or there is no such dataset.
        """
        with self._reading():
            values: npt.NDArray[Any] = self._file[name][begin:end]
        return values

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except HDF5_ERRORS as error:
            raise DamagedFileError(
                f"embeddings file {self.path} cannot be read ({error}): run the command that made it again."
            ) from error


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
