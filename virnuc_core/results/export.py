"""Embeddings in the formats of other programs: NumPy's .npy and .npz, and AnnData's .h5ad."""

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from virnuc_core.errors import UsageError
from virnuc_core.files import atomic_path
from virnuc_core.results.embeddings import Embeddings, Rows
from virnuc_core.results.embeddings_file import LENGTHS, ROWS_AT_ONCE, SCORES

_FIRST_DAY: Final = (1980, 1, 1, 0, 0, 0)  # equal arrays are equal files


def export_embeddings(embeddings: str | Path, to: str | Path, *, vectors: str | None = None) -> int:
    """Writes an embeddings file in another format, which the suffix of `to` names.

    `.npy` is the matrix of vectors alone, `.npz` also has ids, scores and attributes; both are written a block of rows at
    a time. `.h5ad` is an AnnData with `X` the vectors, `obs` the ids and scores, and `uns` the attributes; it is put together
    in memory, and needs the package `anndata`.

    Args:
        embeddings: the `embeddings.h5` of a predict run, the file of an embed run, or what else `open_embeddings` reads.
        to: the new file; an older one is replaced.
        vectors: `dna` or `protein`, for one model of a predict run; None takes both side by side.

    Returns:
        Number of rows.

    Raises:
        UsageError: the suffix is another one, the file has no such vectors, or `anndata` is not installed.
        InputError: there is no embeddings file.
        DamagedFileError: it is not whole.
    """
    path = Path(to)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise UsageError(f"{path} has none of the suffixes {', '.join(_WRITERS)}, which say what to write.")
    with Embeddings(embeddings) as source:
        rows = source.matrix(vectors)
        with atomic_path(path) as temporary:
            write(temporary, source, rows)
        return len(source)


def _write_npy(path: Path, source: Embeddings, rows: Rows) -> None:
    with path.open("wb") as file:
        _write_rows(file, rows)


def _write_npz(path: Path, source: Embeddings, rows: Rows) -> None:
    """As `numpy.savez`, but without all vectors in memory at once."""
    columns = {"ids": np.array(source.ids, np.str_), "attributes": np.array(json.dumps(source.attrs))}
    if source.scores is not None:
        columns[SCORES] = source.scores
    if source.lengths is not None:
        columns[LENGTHS] = source.lengths
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open(zipfile.ZipInfo("vectors.npy", _FIRST_DAY), "w", force_zip64=True) as member:
            _write_rows(member, rows)
        for name, values in columns.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", _FIRST_DAY), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, values, allow_pickle=False)


def _write_rows(file: IO[bytes], rows: Rows) -> None:
    """A matrix in NumPy's format, a block of rows at a time."""
    header = {
        "descr": np.lib.format.dtype_to_descr(rows.dtype),
        "fortran_order": False,
        "shape": rows.shape,
    }
    np.lib.format.write_array_header_1_0(file, header)
    for block in _blocks(rows):
        file.write(np.ascontiguousarray(block, rows.dtype).tobytes())


def _blocks(rows: Rows) -> Iterator[npt.NDArray[Any]]:
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[begin : begin + ROWS_AT_ONCE]


def _write_h5ad(path: Path, source: Embeddings, rows: Rows) -> None:
    try:
        import anndata
    except ImportError as error:
        raise UsageError(
            "writing .h5ad needs the package anndata: pip install 'virnuc[anndata]', or choose .npz."
        ) from error
    names = [name for part in rows.names for name in source.vector_names(part)]
    data = anndata.AnnData(
        X=rows[:],
        obs=_with_plain_strings(source.as_dataframe()),
        var=_with_plain_strings(pd.DataFrame(index=names)),
        uns=dict(source.attrs),
    )
    data.write_h5ad(path, convert_strings_to_categoricals=False)


def _with_plain_strings(table: pd.DataFrame) -> pd.DataFrame:
    """Strings as Python has them: not every anndata writes those of every pandas."""
    plain = table.astype({name: object for name in table.columns if table[name].dtype.kind not in "iuf"})
    return plain.set_index(table.index.astype(object))


_WRITERS: Final[dict[str, Callable[[Path, Embeddings, Rows], None]]] = {
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".h5ad": _write_h5ad,
}
