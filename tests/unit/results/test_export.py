"""Embeddings in other programs' formats, read back by these programs."""

import json
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pytest

from tests.made_models import MadeRun
from virnuc_core.errors import InputError, UsageError
from virnuc_core.results.embeddings import Embeddings, export_embeddings


def test_npz_has_all_of_it(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "vectors.npz"
    rows = export_embeddings(finished_run.folder.embeddings, path)
    with np.load(path, allow_pickle=False) as arrays, Embeddings(finished_run.folder.embeddings) as source:
        assert rows == len(source)
        assert np.array_equal(arrays["vectors"], source.vectors[:])
        assert arrays["vectors"].dtype == np.float32
        assert arrays["ids"].tolist() == source.ids
        assert np.array_equal(arrays["scores"], source.scores)
        assert json.loads(str(arrays["attributes"])) == source.attrs
    again = tmp_path / "again.npz"
    export_embeddings(finished_run.folder.embeddings, again)
    assert again.read_bytes() == path.read_bytes()


def test_npy_is_the_matrix(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "vectors.npy"
    export_embeddings(finished_run.folder.embeddings, path, vectors="dna")
    with Embeddings(finished_run.folder.embeddings) as source:
        assert np.array_equal(np.load(path, mmap_mode="r"), source.matrix("dna")[:])


def test_anndata_reads_it(finished_run: MadeRun, tmp_path: Path) -> None:
    path = tmp_path / "vectors.h5ad"
    export_embeddings(finished_run.folder.embeddings, path, vectors="protein")
    data = anndata.read_h5ad(path)
    with Embeddings(finished_run.folder.embeddings) as source:
        assert np.array_equal(data.X, source.matrix("protein")[:])
        assert data.obs_names.tolist() == source.ids
        assert data.obs["p_virus"].tolist() == source.as_dataframe()["p_virus"].tolist()
        assert data.obs["contig"].tolist() == source.as_dataframe()["contig"].tolist()
        assert data.var_names[:2].tolist() == ["protein_0", "protein_1"]
        assert data.uns["plan_fingerprint"] == source.attrs["plan_fingerprint"]


@pytest.mark.parametrize("name", ["vectors.csv", "vectors"])
def test_another_suffix_is_refused(finished_run: MadeRun, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="h5ad"):
        export_embeddings(finished_run.folder.embeddings, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_anndata_the_message_says_what_to_install(finished_run: MadeRun, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['anndata'] = None\n"
        "from virnuc_core.results.embeddings import export_embeddings\n"
        f"export_embeddings({str(finished_run.folder.embeddings)!r}, {str(tmp_path / 'x.h5ad')!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "UsageError: writing .h5ad needs the package anndata: pip install 'virnuc[anndata]'" in done.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        export_embeddings(tmp_path / "none.h5", tmp_path / "x.npz")
