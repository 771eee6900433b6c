"""The file of vectors and scores in input order: names of its datasets, how it is written and read.

docs/formats.md describes the layout.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import (
    CHECKSUM_SUFFIX,
    HDF5_ERRORS,
    SCHEMA_VERSION,
    ArrayDigest,
    plain_attributes,
    read_attributes,
    stored_dataset,
)
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.plan import PlannedModel, RunPlan
from virnuc_core.plain_text import cell_text
from virnuc_core.specs import Family

IDS: Final = {"predict": "frame_ids", "embed": "ids"}
VECTORS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}
EMBED_VECTORS: Final = "embeddings"
FEATURES: Final = "vectors"  # of both models side by side, in files of other programs
LENGTHS: Final = "lengths"
SCORES: Final = "scores"
DATASETS: Final = (*VECTORS.values(), EMBED_VECTORS, FEATURES, LENGTHS, SCORES)
ROWS_AT_ONCE: Final = 4096

_POOLING: Final[dict[Family, str]] = {
    "dnabert_s": "mean over all tokens, [CLS] and [SEP] included",
    "esm2": "mean over residues, BOS and EOS excluded",
}
# Kinds of the values and number of dimensions of all datasets that are no vectors.
_FORMS: Final = {**dict.fromkeys(IDS.values(), ("SO", 1)), LENGTHS: ("i", 1)}
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
        kind: `predict` for rows that are frames, `embed` for rows that are sequences.
    """

    def __init__(self, path: Path, *, sealed: bool = True) -> None:
        """Opens the file.

        Args:
            path: the file.
            sealed: it is as virnuc writes it; otherwise it need not have attributes or checksums, its ids may be text of
                any length, and datasets that virnuc does not know are passed over.

        Raises:
            DamagedFileError: it is missing, not whole, not an embeddings file, or of another schema.
        """
        self.path = path
        with self._reading():
            self._file = h5py.File(path, "r")
            self.attributes: dict[str, Any] = (read_attributes if sealed else plain_attributes)(self._file)
            self.kind = kind_of(self.attributes, self._file)
            names = list(self._file)
            if sealed:
                self._ids = IDS[self.attributes["kind"]]
            else:
                self._ids = next(name for name in IDS.values() if name in names)
                names = [name for name in names if name == self._ids or name in DATASETS]
            self._datasets = {
                name: stored_dataset(self._file, name, text=not sealed and name == self._ids)
                for name in names
            }
            self.num_rows = len(self._datasets[self._ids])
            for name, dataset in self._datasets.items():
                require_form(name, dataset, self.num_rows)

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

    def verify_unguarded(self) -> None:
        """Verifies a file that another program wrote again: HDF5 itself checks what virnuc writes when it is read.

        Raises:
            DamagedFileError: a dataset is not as its checksum says.
        """
        if not all(dataset.fletcher32 or not dataset.size for dataset in self._datasets.values()):
            self.verify()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except HDF5_ERRORS as error:
            raise DamagedFileError(
                f"embeddings file {self.path} cannot be read ({error}): run the command that made it again."
            ) from error


def kind_of(attributes: Mapping[str, Any], datasets: Container[str]) -> str:
    """Of which command a file is, also when it does not say so: `predict` or `embed`."""
    kind = attributes.get("kind")
    return kind if kind in IDS else "embed" if EMBED_VECTORS in datasets else "predict"


def require_form(name: str, values: h5py.Dataset | npt.NDArray[Any], num_rows: int) -> None:
    """Refuses a dataset of other rows, dimensions or values than one of its name has.

    Raises:
        ValueError: it is such a one.
    """
    kinds, dimensions = _FORMS.get(name, ("f", 2))
    if values.ndim != dimensions or len(values) != num_rows or values.dtype.kind not in kinds:
        raise ValueError(f"{name!r} has another form than it must have")
    if name == SCORES and values.shape[1] != 2:
        raise ValueError(f"{name!r} has another form than it must have")


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
