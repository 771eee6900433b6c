"""Embeddings for people: ids, vectors that are read when they are asked for, scores, and a table of the rows."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from virnuc_core.errors import UsageError
from virnuc_core.results.embeddings_file import EMBED_VECTORS, FEATURES, LENGTHS, SCORES, VECTORS
from virnuc_core.results.embeddings_reader import EmbeddingsReader, open_reader
from virnuc_core.sequences.frames import ROW_NAMES

_FRAME_ID: Final = re.compile(
    rf"(?P<contig>.*)_chunk_(?P<chunk>[0-9]+)(?P<frame>{'|'.join(ROW_NAMES)})", re.DOTALL
)


class Rows:
    """A matrix in an embeddings file: what is sliced from it is read then, and checked.

    `rows[5]` is one vector, `rows[10:20]`, `rows[[3, 1]]` and `rows[mask]` are matrices, `rows[:]` or `np.asarray(rows)`
    is all of it.

    Attributes:
        names: the datasets that lie side by side in it.
        shape: (N, D).
        dtype: of the values.
    """

    def __init__(self, file: EmbeddingsReader, names: Sequence[str]) -> None:
        forms = [file.form(name) for name in names]
        self.names = tuple(names)
        self.shape = (file.num_rows, sum(shape[1] for shape, _ in forms))
        self.dtype = np.result_type(*(dtype for _, dtype in forms))
        self._file = file

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reads rows.

        Raises:
            IndexError: there are no such rows.
            DamagedFileError: they cannot be read.
        """
        if isinstance(key, int | np.integer):
            vector: npt.NDArray[Any] = self[[int(key)]][0]
            return vector
        if isinstance(key, slice):
            wanted = range(len(self))[key]
            if wanted.step == 1:
                return self._beside([self._file.rows(name, wanted.start, wanted.stop) for name in self.names])
            return self._picked(np.asarray(wanted, np.int64))
        return self._picked(_row_numbers(key, len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{' and '.join(self.names)}: {self.shape[0]} x {self.shape[1]} {self.dtype}, in {self._file.path}>"

    def _picked(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return self._beside([self._file.pick(name, rows) for name in self.names])

    def _beside(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return parts[0] if len(parts) == 1 else np.hstack(parts)


class Embeddings:
    """An embeddings file that is open for reading; close it, or use it in a `with` block.

    Attributes:
        attrs: what the file says of itself: models, precision, pooling, checksums.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the file.

        Raises:
            InputError: there is no such file.
            DamagedFileError: it is no embeddings file, or not whole.
            CheckpointError: it is a torch file that holds more than tensors and names.
        """
        self._file = open_reader(Path(path))
        self.attrs: dict[str, Any] = dict(self._file.attributes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._file.num_rows

    def __repr__(self) -> str:
        return f"<{self._file.kind} embeddings, {len(self)} rows of {', '.join(self.datasets)}: {self._file.path}>"

    def close(self) -> None:
        """Closes the file; what was read before stays."""
        self._file.__exit__()

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the matrices of vectors: `dna` and `protein` of a predict run, `embeddings` of an embed run.

        `vectors` is what other programs wrote as one matrix for both models.
        """
        return tuple(name for name in (*VECTORS.values(), EMBED_VECTORS, FEATURES) if name in self._file)

    @cached_property
    def ids(self) -> list[str]:
        """One id a row: `CONTIG_chunk_NFRAME` in a predict run, the name of the sequence in an embed run."""
        return self._file.ids(0, len(self))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """int64 (N,), letters of each sequence; None for a predict run."""
        return self._file.rows(LENGTHS, 0, len(self)) if LENGTHS in self._file else None

    @property
    def vectors(self) -> Rows:
        """All vectors of a row side by side, (N, D): DNA before protein, as a classifier head takes them.

        Raises:
            UsageError: the run has kept no vectors.
        """
        return self.matrix()

    def matrix(self, name: str | None = None) -> Rows:
        """One matrix of vectors, (N, D).

        Args:
            name: one of `datasets`; None puts all of them side by side.

        Raises:
            UsageError: there is no such matrix.
        """
        names = self.datasets if name is None else (name,)
        if not names or not set(names) <= set(self.datasets):
            there = f"only {' and '.join(self.datasets)}" if self.datasets else "none, only scores"
            raise UsageError(
                f"{self._file.path} holds no {name or ''} vectors ({there}): make the run again with them, or name others."
            )
        return Rows(self._file, names)

    @cached_property
    def scores(self) -> npt.NDArray[np.float32] | None:
        """float32 (N, 2), P(other) and P(virus); None where the file has none, as that of an embed run."""
        return self._file.rows(SCORES, 0, len(self)) if SCORES in self._file else None

    def as_dataframe(self, *, vectors: bool = False) -> pd.DataFrame:
        """A table with one row an id.

        Args:
            vectors: add a column for each number of the vectors: `dna_0`, ..., `protein_0`, ...

        Returns:
            Indexed by `id`; `contig`, `chunk`, `frame`, `p_other`, `p_virus` of a predict run, `length` of an embed run.
        """
        table = pd.DataFrame(self._columns(), index=pd.Index(self.ids, name="id"))
        if not vectors:
            return table
        numbers = pd.DataFrame(self.vectors[:], index=table.index, columns=self.vector_names())
        return pd.concat([table, numbers], axis=1)

    def vector_names(self, name: str | None = None) -> list[str]:
        """A name for each column of a matrix, by the matrix and the number in it."""
        matrices = [self.matrix(part) for part in self.matrix(name).names]
        return [f"{matrix.names[0]}_{column}" for matrix in matrices for column in range(matrix.shape[1])]

    def _columns(self) -> dict[str, Any]:
        if self._file.kind == "embed":
            return {} if self.lengths is None else {"length": self.lengths}
        parts = [_FRAME_ID.fullmatch(name) for name in self.ids]
        columns: dict[str, Any] = {
            "contig": [part["contig"] if part else name for part, name in zip(parts, self.ids, strict=True)],
            "chunk": [int(part["chunk"]) if part else 0 for part in parts],
            "frame": [part["frame"] if part else "" for part in parts],
        }
        if self.scores is not None:
            columns |= {"p_other": self.scores[:, 0], "p_virus": self.scores[:, 1]}
        return columns


def _row_numbers(key: Sequence[int] | npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Numbers of rows from what NumPy takes for an index: numbers, also from the end, or a mask."""
    numbers = np.asarray(key)
    if numbers.dtype == np.bool_ and numbers.shape != (count,):
        raise IndexError(f"a mask of {numbers.shape} does not fit {count} rows")
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iub"):
        raise IndexError("rows are chosen by a number, a slice, a list of numbers or a mask")
    return np.arange(count)[numbers if numbers.size else slice(0)]
